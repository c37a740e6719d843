"""Products of operands whose rows are not multiples of 16 bytes: copied first, any k, any address, NaN around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import gemm_cases as cases
from support.compare import running_on
from support.places import at
from support.product_cases import assert_product, codes, exact, scale, spread
from torch import Tensor

import rtkernels
from rtkernels import explain, scaled_mm
from rtkernels.ops.gemm import pad_plan
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.gemm.product import Groups, Matrix, Product, Scales
from rtkernels.runtime.launch.device import device_info

# As a backend whose target is enough to ask.
PAD = SimpleNamespace(
    unsupported=lambda product, target: pad_plan.unsupported(product, device_info(-1), PRODUCTS),
    steps=lambda product, device: pad_plan.steps(product, device, PRODUCTS),
)
ODD = {"operand_a": {"aligned": False}, "operand_b": {"aligned": False}}
ROW, ALONG, SQUARE = ({"per_rows": r, "depth": d} for r, d in ((1, 0), (1, 128), (128, 128)))
CASES: dict[str, tuple[str, str, int, int, int, dict[str, Any]]] = {
    "bf16": ("bf16", "bf16", 131, 139, 1001, ODD),
    "bf16_a_only": ("bf16", "bf16", 70, 40, 99, {"operand_a": {"aligned": False}}),
    "bf16_b_only": ("bf16", "bf16", 3, 40, 99, {"operand_b": {"aligned": False, "padding": 4}}),
    "bf16_across": ("bf16", "bf16", 71, 37, 99,
                    {"operand_a": {"aligned": False, "across": True}, "operand_b": {"aligned": False, "across": True}}),
    "fp16_one": ("fp16", "fp16", 1, 1, 1, ODD | {"out": "fp32"}),
    "fp8_rows": ("e4m3", "e4m3", 131, 70, 999, ODD | {"scale_a": ROW, "scale_b": ROW, "bias": "bf16"}),
    "fp8_few_rows": ("e4m3", "e4m3", 5, 70, 1000, ODD | {"scale_a": ROW, "scale_b": ROW}),
    "fp8_mixed": ("e5m2", "e4m3", 70, 24, 24, ODD | {"out": "fp32"}),
    "fp8_blocks": ("e4m3", "e4m3", 70, 136, 1001, ODD | {"scale_a": ALONG, "scale_b": SQUARE}),
    "fp8_blocks_one": ("e4m3", "e4m3", 70, 40, 1, ODD | {"scale_a": ALONG, "scale_b": SQUARE}),
    "fp8_columns": ("e4m3", "e4m3", 70, 136, 999, ODD | {"scale_a": ALONG, "scale_b": ALONG, "out": "fp32"}),
    "int8": ("int8", "int8", 131, 70, 1000, ODD | {"out": "int32"}),
    "int8_rows": ("int8", "int8", 70, 33, 8, ODD | {"scale_a": ROW, "scale_b": ROW, "add": "bf16", "act": "silu"}),
    "uint8": ("uint8", "int8", 70, 33, 1001, ODD | {"out": "int32"}),
    "gated": ("bf16", "bf16", 70, 35, 75, ODD | {"gate": "silu"}),
    "int4": ("int4", "int4", 70, 24, 72, ODD | {"scale_a": ROW, "scale_b": ROW}),
    "bf16_int4": ("bf16", "int4", 70, 24, 150, ODD | {"scale_b": ROW}),
    "nvfp4": ("e2m1", "e2m1", 131, 40, 104, ODD | {"scale_a": ALONG | {"depth": 16, "token": "ue4m3"},
                                                   "scale_b": ALONG | {"depth": 16, "token": "ue4m3"}}),
}  # fmt: skip


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("case", CASES)
def test_products(place: str, case: str) -> None:
    a, b, m, n, k, options = CASES[case]
    with running_on(place) as device:
        if device == "cuda":
            options = options | {"device": device}
        cases.plain(PAD, a, b, m, n, k, **options)


def _on(device: str, t: Tensor) -> Tensor:
    """Return a tensor on a device, at an odd address, in the middle of NaN."""
    rows, cols = t.shape
    memory = torch.full((rows + 2, cols), float("nan"), device=device).to(t.dtype)
    if not t.dtype.is_floating_point:
        memory = torch.full((rows + 2, cols), 101, device=device, dtype=t.dtype)
    memory[1:-1].copy_(t)
    return memory[1:-1]


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("k", (1001, 1000, 999, 24, 8, 1))
@pytest.mark.parametrize("kind", ("bf16", "fp16", "e4m3", "block", "int8"))
def test_any_k(place: str, kind: str, k: int) -> None:
    m, n, token = 67, 129, "e4m3" if kind == "block" else kind
    a, b = codes(token, m, k), codes(token, n, k, seed=1)
    scales: list[Tensor] = []
    wanted, options = exact(a.values, b.values), {}
    if kind == "block":
        scales = [scale(m, -(-k // 128)), scale(-(-n // 128), -(-k // 128), seed=2)]
        wanted = exact(a.values * spread(scales[0], 1, 128, (m, k)), b.values * spread(scales[1], 128, 128, (n, k)))
        options = {"recipe": "block_1x128_128x128"}
    with running_on(place) as device:
        left, right = _on(device, a.codes), _on(device, b.codes)
        scales = [s.to(device) for s in scales]
        odd = any(t.data_ptr() % 16 or t.stride(0) * t.element_size() % 16 for t in (left, right))
        backends = ("auto", "pad") if odd else ("auto",)
        for backend in backends:
            got = scaled_mm(left, right, *scales, **options, backend=backend)
            assert_product(got, *wanted, codes=a.codes)


@at("sm_80", "sm_90", "cuda")
def test_groups(place: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(75, 99, generator=generator).bfloat16(), torch.randn(3, 33, 99, generator=generator).bfloat16()
    ends, sizes = torch.tensor([5, 5, 70], dtype=torch.int32), torch.tensor([25, 0, 3], dtype=torch.int32)
    calls = {
        "rows": lambda f: rtkernels.grouped_mm(f(a), f(b), offs=f(ends), backend="pad")[:70],
        "masked": lambda f: rtkernels.grouped_mm_masked(f(a.view(3, 25, 99)), f(b), masked_m=f(sizes), backend="pad"),
    }
    for name, call in calls.items():
        with running_on(place) as device:
            got = call(lambda t: t.to(device)).cpu()
        exact_b = b.double().transpose(1, 2)
        if name == "rows":
            wanted = torch.cat([a[:5].double() @ exact_b[0], a[5:70].double() @ exact_b[2]])
        else:
            wanted = torch.bmm(a.view(3, 25, 99).double(), exact_b)
            got, wanted = (torch.cat([t[0], t[2, :3]]) for t in (got, wanted))
        torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8, atol=1e-3)


def test_what_is_unsupported() -> None:
    info = device_info(-1)
    odd, bf16 = Matrix("bf16", 65, aligned=False), Matrix("bf16", 64)
    product = Product(128, 64, 65, odd, odd, bf16)

    def refused(**changed: Any) -> str:
        return pad_plan.unsupported(product._replace(**changed), info, PRODUCTS) or ""

    assert refused() == ""
    assert "multiples of 32 bytes" in refused(a=bf16, b=bf16) and "nothing to add up" in refused(k=0)
    assert "2^31" in refused(m=1 << 31)
    assert "inside of a byte" in refused(b=Matrix("int4", 65, aligned=False), scale_b=Scales(1, 0, 1))
    assert "same type" in refused(b=odd._replace(token="fp16"))


def test_explained() -> None:
    a, b = (torch.empty(4096, 1000, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    told = explain(scaled_mm, a, b, target="9.0")
    assert told.backend == "pad" and told.refused == {}
    assert told.summary.startswith("rows of a and b to multiples of 16 bytes or more first, then sm90: 128 x 256 tiles")
    assert explain(scaled_mm, a[:16, :1], b[:, :1], target="9.0").backend != "pad"  # too little to copy
    few = explain(scaled_mm, a[:16], b, torch.empty(16, device="meta"), None, recipe="auto", target="9.0")
    assert few.summary.endswith("k shared by the blocks of a cluster")


def test_k_is_rounded_only_with_zeros_in_both() -> None:
    odd, even = Matrix("e4m3", 1000, aligned=False), Matrix("e4m3", 1024)
    product = Product(128, 64, 1000, odd, odd, Matrix("bf16", 64))

    def padded(**changed: Any) -> Product:
        p = product._replace(**changed)
        return pad_plan._padded(p, pad_plan._copied(p, device_info(-1)))

    assert padded().k == 1008 and padded().a.pitch == padded().b.pitch == 1024
    assert padded(b=even).k == 1000 and padded(b=even).b.pitch == 1024
    assert padded(scale_a=Scales(1, 128, 8, 1)).k == 1008
    assert padded(scale_a=Scales(1, 8, 125, 1)).k == 1000
    assert padded(groups=Groups("rows", 2)).k == 1000


@pytest.mark.parametrize(
    "m, n, k, copied",
    (
        (1323, 7792, 8520, "a"),  # rows of 17040 bytes begin inside of a sector
        (12749, 1000, 1096, ""),  # so do those of 2192; sm90 loads even and odd rows of b separately
        (4096, 4096, 1008, ""),  # those of 2016 do not
        (64, 16384, 1000, ""),  # the copy would take longer than the product
        (4096, 4096, 1001, "a and b"),  # these must be copied
    ),
)
def test_copies_that_save_time(m: int, n: int, k: int, copied: str) -> None:
    a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    told = explain(scaled_mm, a, b, target="9.0")
    assert (told.backend == "pad") == bool(copied)
    assert told.summary.startswith(f"rows of {copied} to" if copied else "")


@at("sm_90", "cuda")
@pytest.mark.parametrize("kind", ("bf16", "e4m3"))
def test_aligned_copies(place: str, kind: str) -> None:
    """Rows of 16 bytes more than a multiple of 32: ``pad`` copies them if it is asked to."""
    m, n, k = 70, 72, 72 if kind == "bf16" else 144
    a, b = codes(kind, m, k), codes(kind, n, k, seed=1)
    with running_on(place) as device:
        got = scaled_mm(a.codes.to(device), b.codes.to(device), backend="pad")
        assert_product(got, *exact(a.values, b.values), codes=a.codes)
