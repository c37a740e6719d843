"""Products of codes that are unpacked for wgmma: every code, byte scales in both layouts, tails of k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import gemm_cases as cases
from support.compare import running_on
from support.places import at

import rtkernels
from rtkernels.ops.gemm import unpack_plan
from rtkernels.ops.gemm.product import Groups, Matrix, Product, Scales
from rtkernels.runtime import targets

NVFP4, MX = {"per_rows": 1, "depth": 16, "token": "ue4m3"}, {"per_rows": 1, "depth": 32, "token": "e8m0"}
SWIZZLED = {**NVFP4, "swizzled": True}
ROW, GROUPS = {"per_rows": 1, "depth": 0}, {"per_rows": 1, "depth": 64}
# A thread unpacks 16 of k: at 264, 152 and 88 the last one has half of them.
CASES: dict[str, tuple[str, str, int, int, int, dict[str, Any]]] = {
    "nvfp4": ("e2m1", "e2m1", 131, 40, 112, {"scale_a": NVFP4, "scale_b": SWIZZLED, "global_scale": 1}),
    "mxfp8": ("e4m3", "e4m3", 130, 24, 160, {"scale_a": {**MX, "swizzled": True}, "scale_b": MX, "out": "fp32"}),
    "bf16_mxfp4": ("bf16", "e2m1", 128, 24, 96, {"scale_b": MX, "bias": "bf16", "act": "silu"}),
    "bf16_int8": ("bf16", "int8", 128, 24, 88, {"scale_b": ROW}),
    "bf16_int4_groups": ("bf16", "int4", 130, 136, 264, {"scale_b": GROUPS, "out": "fp32"}),
    "int4": ("int4", "int4", 515, 24, 152, {"scale_a": ROW, "scale_b": ROW}),
    "fp16_nvfp4": ("fp16", "e2m1", 128, 24, 96, {"scale_b": NVFP4, "out": "fp16"}),
    "bf16_e5m2": ("bf16", "e5m2", 128, 24, 80, {}),
    "fp16_e4m3": ("fp16", "e4m3", 128, 24, 80, {"scale_b": ROW}),
    "uint4": ("uint4", "uint4", 515, 24, 160, {"out": "int32"}),
    "int8_int4": ("int8", "int4", 515, 24, 160, {"out": "int32"}),
    "bf16_fp8_squares": ("bf16", "e4m3", 130, 136, 272, {"scale_b": {"per_rows": 128, "depth": 128}}),
}  # fmt: skip
QUICK = ("nvfp4", "bf16_int4_groups", "int4")  # the others differ only in what is unpacked


@at("sm_90", "cuda")
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_products_of_codes(place: str, case: str) -> None:
    a, b, m, n, k, options = CASES[case]
    with running_on(place) as device:
        cases.plain(unpack_plan, a, b, m, n, k, device=device, **options)


@at("sm_90", "cuda")
def test_groups_of_rows(place: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(140, 64, generator=generator).bfloat16()
    codes, scales, _ = rtkernels.quantize_nvfp4(torch.randn(2, 24, 64, generator=generator), global_scale=1.0)
    given = {"b": codes, "scale_b": scales, "offs": torch.tensor([75, 140], dtype=torch.int32)}
    how = {"recipe": "nvfp4", "packed": (None, "e2m1")}
    expected = rtkernels.grouped_mm(a, **given, **how)
    with running_on(place) as device:
        moved = {name: t.to(device) for name, t in given.items()}
        got = rtkernels.grouped_mm(a.to(device), **moved, **how, backend="unpack")
    torch.testing.assert_close(got.cpu(), expected, rtol=2.0**-7, atol=1e-3)


def test_what_is_unsupported() -> None:
    sm90, bf16 = targets.parse("sm_90a"), Matrix("bf16", 64)
    four = Matrix("e2m1", 64)
    product = Product(128, 64, 64, bf16, four, bf16, scale_b=Scales(1, 16, 4, 1, "ue4m3"))
    assert unpack_plan.unsupported(product, sm90) is None
    for changed, target, reason in (
        (product, targets.parse("sm_80"), "no wgmma"),
        (product._replace(m=64), sm90, "64 rows"),
        (product._replace(b=bf16, scale_b=None), sm90, "a has 16 bits"),
        (product._replace(b=four._replace(aligned=False)), sm90, "16 bytes"),
        (product._replace(a=Matrix("fp16", 64), scale_b=Scales(1, 32, 2, 1, "e8m0")), sm90, "larger range"),
        (product._replace(groups=Groups("depth", 2)), sm90, "groups of k"),
        (product._replace(groups=Groups("rows", 2)), sm90, "64 rows"),
        (product._replace(scale_b=Scales(1, 32, 2, 1)), sm90, "64 of k"),
    ):
        assert reason in (unpack_plan.unsupported(changed, target) or "")


def test_explained() -> None:
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    b = torch.empty(4096, 2048, dtype=torch.uint8, device="meta")
    scale = torch.empty(4096, 32, device="meta")
    told = rtkernels.explain(rtkernels.scaled_mm, a, b, None, scale, packed=(None, "int4"), target="9.0")
    assert told.backend == "unpack" and told.summary.startswith("b to bf16 first, then 128 x 256 tiles")
