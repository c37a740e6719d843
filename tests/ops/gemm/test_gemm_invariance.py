"""Products with batch invariance: rows have the same bits in every number of rows, at every place and alignment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels as rtk

K, N, ROWS = 160, 72, 150
F8 = torch.float8_e4m3fn
Product = Callable[[Tensor, Tensor], Tensor]


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _fp8_rows(x: Tensor, w: Tensor) -> Tensor:
    (a, scale_a), (b, scale_b) = (rtk.quantize_fp8(t, granularity="row") for t in (x, w))
    return rtk.scaled_mm(a, b, scale_a, scale_b)


def _fp8_groups(x: Tensor, w: Tensor) -> Tensor:
    (a, scale_a), (b, scale_b) = (rtk.quantize_fp8(t, granularity="group") for t in (x, w))
    return rtk.scaled_mm(a, b, scale_a, scale_b, recipe="block_1x128_1x128")


def _low_bits(x: Tensor, w: Tensor) -> Tensor:
    codes, scale = rtk.quantize_int8(w, granularity="row")
    return rtk.scaled_mm(x, codes, None, scale)


PRODUCTS: dict[str, Product] = {
    "bf16": lambda x, w: rtk.scaled_mm(x, w, bias=w[:, 0]),
    "columns": lambda x, w: rtk.scaled_mm(x.t().contiguous().t(), w),
    "added": lambda x, w: rtk.scaled_mm(x, w, add=x[:, :N], act="silu", out_dtype=torch.float32),
    "gated": lambda x, w: rtk.gated_mm(x, w),
    "fp8 rows": _fp8_rows,
    "fp8 groups": _fp8_groups,
    "int8 weights": _low_bits,
    "torch": lambda x, w: torch.nn.functional.linear(x, w, w[:, 0]),
    "torch, fp16": lambda x, w: x.half() @ w.half().t(),
    "grouped": lambda x, w: rtk.grouped_mm(
        x, w[None].expand(2, -1, -1).contiguous(), offs=torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
    ),
}  # fmt: skip


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_products(name: str, place: str) -> None:
    with running_on(place) as device, rtk.batch_invariant(1):
        x, w = _normal(ROWS, K, seed=0).to(device), _normal(N, K, seed=1).to(device)
        whole = PRODUCTS[name](x, w)
        for first, end in ((0, 1), (7, 24), (20, 53), (3, 132)):
            assert torch.equal(PRODUCTS[name](x[first:end], w), whole[first:end]), (first, end)
        shifted = torch.empty(2 * K + 1, dtype=x.dtype, device=device)[1:].view(2, K)
        shifted.copy_(x[:2])
        assert torch.equal(PRODUCTS[name](shifted, w), whole[:2])
        wide = torch.empty(2, K + 3, dtype=x.dtype, device=device)
        wide[:, :K] = x[:2]
        assert torch.equal(PRODUCTS[name](wide[:, :K], w), whole[:2])


@at("sm_80", "sm_90", "cuda")
def test_odd_sizes(place: str) -> None:
    with running_on(place) as device, rtk.batch_invariant(1):
        x, w = _normal(70, 45, seed=0).to(device), _normal(33, 45, seed=1).to(device)
        whole = torch.nn.functional.linear(x, w)
        assert torch.equal(torch.nn.functional.linear(x[5:6], w), whole[5:6])
        torch.testing.assert_close(whole.double(), x.double() @ w.double().t(), rtol=1e-2, atol=2e-2)
