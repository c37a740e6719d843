"""Norm of a branch plus residual in decoding steps, compared with fp64."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close, running_on
from support.places import at

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.step_norm import FORWARD

HALVES = (torch.bfloat16, torch.float16)


def case(device="cpu", rows=3, cols=1152, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(cols)
    x, residual = torch.randn(2, rows, 1, cols, generator=g).to(dtype).to(device)
    return x, torch.randn(cols, generator=g).to(dtype).to(device), residual, 1e-6, 1.0


@at()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (3, 1152), (2, 5376), (2, 100), (1, 1)])
def test_values(rows: int, cols: int, dtype: torch.dtype, place: str) -> None:
    with running_on(place) as device:
        x, weight, residual, eps, offset = given = case(device, rows, cols, dtype)
        exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * (offset + weight.double())
        scale = exact.abs() + residual.double().abs()
        assert_close(FORWARD.call(*given), exact + residual.double(), c=2.1, scale=scale)


@at("cpu", "sm_90")
def test_strides_and_special_values(place: str) -> None:
    with running_on(place) as device:
        x, weight, residual, *options = case(device)
        wanted = FORWARD.call(x, weight, residual, *options)
        spread = torch.stack([x, x], -1)[..., 0]
        assert torch.equal(FORWARD.call(spread, weight, residual, *options), wanted)
        x = x.clone()
        x[1, 0, 3], residual[2, 0, 5] = torch.nan, torch.inf
        got = FORWARD.call(x, weight, residual, *options)
        assert got[1].isnan().all() and torch.equal(got[0], wanted[0]) and got[2, 0, 5] == torch.inf
        assert FORWARD.call(x[:0], weight, residual[:0], *options).shape == (0, 1, 1152)


@pytest.mark.parametrize(("place", "value", "message"), [
    (1, torch.zeros(7, dtype=torch.bfloat16), "weight"), (2, torch.zeros(3, 1, 8), "residual"),
    (0, torch.zeros(2), "x"),
])  # fmt: skip
def test_wrong_arguments(place: int, value: object, message: str) -> None:
    given = list(case())
    given[place] = value
    with pytest.raises(ArgumentError, match=message):
        FORWARD.call(*given)


def emulated_coverage() -> None:
    with rtkernels.emulate("sm_90"):
        for dtype in HALVES:
            FORWARD.call(*case(dtype=dtype))
