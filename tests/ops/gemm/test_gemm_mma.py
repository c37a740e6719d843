"""Products with mma.sync: every pair of operands, every recipe of scales, every ending and kind of groups."""

from __future__ import annotations

import pytest
import torch
from support import gemm_cases as cases
from torch import Tensor

import rtkernels
from rtkernels.ops.gemm import mma_plan
from rtkernels.ops.gemm.product import Groups, Matrix, Product

TARGETS = ("sm_80", "sm_89", "sm_90")
FLOAT_ACTS = {
    None: lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
}
# Relative to the sum of magnitudes: what the result's type rounds to, and fp32 sums with room for their order.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20, "int32": 0.0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def result_memory(token: str, *shape: int, padding: int = 0, aligned: bool = True) -> tuple[Tensor, Matrix]:
    """Return poisoned memory for a result, and its description."""
    pitch = shape[-1] + padding
    memory = torch.full((*shape[:-1], pitch + 1), 77, dtype=cases.DTYPES[token])
    out = memory.view(-1)[0 if aligned else 1 :].as_strided(shape, [*([shape[-2] * pitch] * (len(shape) - 2)), pitch, 1])
    return out, Matrix(token, pitch, False, aligned, shape[-2] * pitch if len(shape) == 3 else 0)


def check(got: Tensor, wanted: Tensor, magnitude: Tensor, token: str, sums: str = "fp32") -> None:
    """Compare with the exact result, where `magnitude` is that of what was added up."""
    got = got.double()
    assert torch.equal(got.isnan(), wanted.isnan()), "NaN"
    wanted, got = wanted.nan_to_num(0.0, posinf=1e300, neginf=-1e300), got.nan_to_num(0.0, posinf=1e300, neginf=-1e300)
    allowed = ROUNDING[token] * wanted.abs() + (2.0**-20 if sums == "fp32" else 2.0**-8) * magnitude + 1e-30
    if token == "int32":
        allowed = torch.zeros_like(wanted)
    wrong = (got - wanted).abs() > allowed
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first {got[wrong][0]} for {wanted[wrong][0]}"


def plain(
    a: str, b: str, m: int, n: int, k: int, *, out: str = "bf16", scale_a: dict | None = None, scale_b: dict | None = None,
    sums: str = "fp32", seed: int = 0, operand_a: dict | None = None, operand_b: dict | None = None, **rest,
) -> None:  # fmt: skip
    """Make a product without groups and compare it; `rest` are fields of Product."""
    random = generator(seed)
    left = cases.operand(a, m, k, random, **(operand_a or {}))
    right = cases.operand(b, n * (2 if rest.get("gate") else 1), k, random, **(operand_b or {}))
    result, matrix = result_memory(out, m, n)
    tensors = {"a": left.tensor, "b": right.tensor, "out": result}
    x, y, described = left.values, right.values, {}
    for name, given, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, right.values.shape[0])):
        if given is not None:
            s = cases.scaling(rows, k, random, **given)
            tensors[name], described[name] = s.tensor, s.scales
            x, y = (x * s.values, y) if name == "scale_a" else (x, y * s.values)
    if rest.get("global_scale"):
        tensors["global_scale"] = torch.tensor([0.5, 3.0])[: rest["global_scale"]]
    wanted, magnitude = x @ y.T, x.abs() @ y.abs().T
    if rest.get("global_scale"):
        factor = torch.ones(right.values.shape[0], dtype=torch.float64) * 0.5
        if rest["global_scale"] == 2:
            factor[n:] = 3.0
        wanted, magnitude = wanted * factor, magnitude * factor
    if rest.get("bias"):
        tensors["bias"] = torch.randn(right.values.shape[0], generator=random).to(cases.DTYPES[rest["bias"]])
        wanted = wanted + tensors["bias"].double()
    if rest.get("gate"):
        magnitude = (magnitude[:, :n] + 1) * (magnitude[:, n:] + 1)
        wanted = FLOAT_ACTS[rest["gate"]](wanted[:, :n]) * wanted[:, n:]
    if rest.get("add"):
        tensors["add"] = torch.randn(m, n, generator=random).to(cases.DTYPES[rest["add"]])
        wanted, rest["add_pitch"] = wanted + tensors["add"].double(), n
    wanted = FLOAT_ACTS[rest.get("act")](wanted)
    if rest.get("accumulate"):
        wanted = wanted + 77
    product = Product(m, n, k, left.matrix, right.matrix, matrix, sums=sums, **described, **rest)
    cases.run(mma_plan, product, tensors)
    check(result, wanted, magnitude + 1e-3, out, sums)


# ---- operands -------------------------------------------------------------------------------------------------------

SAME = ["bf16", "fp16", "int8", "uint8", "int4", "uint4", "e4m3", "e5m2", "e2m1"]
PAIRS = [
    *((t, t) for t in SAME),
    ("int8", "uint8"), ("uint8", "int8"), ("int4", "uint4"), ("uint4", "int4"), ("e4m3", "e5m2"), ("e5m2", "e4m3"),
    *((a, b) for a in ("bf16", "fp16") for b in ("e4m3", "e5m2", "int8", "uint8", "int4", "uint4", "e2m1")),
    ("int8", "int4"), ("int8", "uint4"), ("uint8", "int4"), ("e4m3", "e2m1"), ("e4m3", "int4"),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pairs(a: str, b: str, target: str) -> None:
    with rtkernels.emulate(target):
        plain(a, b, 33, 70, 160, out="fp32")
        plain(a, b, 3, 9, 37, out="fp32", operand_a={"aligned": False}, operand_b={"aligned": False})
