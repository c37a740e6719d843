"""RWKV-7's keys against fp64, at every layout."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close, running_on
from support.places import DTYPES, at

import rtkernels
from rtkernels.errors import ArgumentError

LAYOUTS = {
    "heads of 64": (lambda x: x, 2), "odd heads": (lambda x: x[:, :35], 5), "misaligned": (lambda x: x[:, 1:101], 4),
    "one head": (lambda x: x, 1), "transposed": (lambda x: x[:, :12].t(), 3), "empty": (lambda x: x[:0], 2),
    "three dimensions": (lambda x: x.view(3, 4, 128), 8),
}  # fmt: skip


def exact(k, kk, a, ka, heads):
    k, kk, a, ka = (t.double() for t in (k, kk, a, ka))
    t = (k * kk).unflatten(-1, (heads, -1))
    unit = (t / (t.square().sum(-1, keepdim=True) + 1e-12).sqrt()).flatten(-2)
    return k * (1 + (a - 1) * ka), unit, unit * a


@at()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, layout: str, place: str) -> None:
    g = torch.Generator().manual_seed(0)
    with running_on(place) as device:
        view, heads = LAYOUTS[layout]
        k, a = (view(torch.randn(12, 128, generator=g).to(dtype).to(device)) for _ in range(2))
        kk, ka = (torch.randn(k.shape[-1], generator=g).to(dtype).to(device) for _ in range(2))
        got = rtkernels.rwkv_key(k, kk, a, ka, heads)
        for one, want in zip(got, exact(k, kk, a, ka, heads), strict=True):
            assert one.shape == k.shape and one.is_contiguous() and one.dtype == dtype
            torch.testing.assert_close(one.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        zero = rtkernels.rwkv_key(torch.zeros_like(k), kk, a, ka, heads)
        assert not any(t.any() for t in zero)


@at()
def test_special_values(place: str) -> None:
    with running_on(place) as device:
        k = torch.ones(4, 8, device=device)
        k[0, 1], k[1, 2], k[2, 0] = torch.nan, torch.inf, 1e-30
        ones = torch.ones(8, device=device)
        got = rtkernels.rwkv_key(k, ones, k * 0 + 0.5, ones, 2)
        assert got.kk[0, :4].isnan().all() and got.kk[1, 2].isnan() and not got.kk[1, :2].any()
        assert_close(got.kk[:, 4:], torch.full((4, 4), 0.5, dtype=torch.float64, device=device))
        assert got.k[1, 2].isnan() or got.k[1, 2].isinf()


def test_refused() -> None:
    k, kk = torch.ones(3, 8), torch.ones(8)
    for arguments, message in (
        ((k, kk, k, kk, 3), "heads is 3; expected a divisor"), ((k, kk[:4], k, kk, 2), r"kk has shape \(4,\)"),
        ((k, kk, k[:2], kk, 2), "a has shape"), ((k, kk, k, kk.half(), 2), "ka has dtype"),
        ((k, kk, k, kk, 0), "heads is 0"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            rtkernels.rwkv_key(*arguments)
