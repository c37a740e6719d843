"""A sparse vector times a matrix against fp64; rows that do not count may hold anything."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import DTYPES, at

import rtkernels
from rtkernels.errors import ArgumentError


@at()
@pytest.mark.parametrize(("n", "m"), [(70, 64), (1, 8), (1200, 300), (33, 7), (600, 1), (0, 8), (40, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, n: int, m: int, place: str) -> None:
    g = torch.Generator().manual_seed(0)
    with running_on(place) as device:
        k, v = (
            torch.randn(n, generator=g).relu().to(dtype).to(device),
            torch.randn(n, m, generator=g).to(dtype).to(device),
        )
        exact = k.double() @ v.double()
        bound = k.double().abs() @ v.double().abs()
        v[k == 0] = torch.nan
        for matrix in (v, v.t().contiguous().t()):
            got = rtkernels.nonzero_mv(k, matrix)
            assert got.shape == (m,) and got.dtype == dtype
            limit = torch.finfo(dtype).eps * exact.abs() + n * 2.0**-23 * bound + 1e-30
            assert ((got.double() - exact).abs() <= limit).all()


@at()
def test_special_values(place: str) -> None:
    with running_on(place) as device:
        v = torch.ones(3, 4, device=device)
        assert not rtkernels.nonzero_mv(torch.tensor([0.0, -0.0, 0.0], device=device), v * torch.inf).any()
        assert rtkernels.nonzero_mv(torch.tensor([0.0, torch.nan, 0.0], device=device), v).isnan().all()
        assert rtkernels.nonzero_mv(torch.tensor([0.0, torch.inf, 1.0], device=device), v).isinf().all()


def test_refused() -> None:
    k, v = torch.ones(3), torch.ones(3, 4)
    for arguments, message in (
        ((v, v), "k has shape"), ((k, v.t()), r"v has shape \(4, 3\); expected \(3, m\)"),
        ((k, v.half()), "v has dtype"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            rtkernels.nonzero_mv(*arguments)
