"""Sorting, distinct elements and membership of NaN, infinities and zeros of both signs, as in torch's CUDA operators:
NaN last and each one distinct, zeros equal, and of equal elements the first.
"""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare, device_of, taken
from support.places import at, emulated

SLOW = pytest.mark.slow
FLOATS = [torch.float32, *(pytest.param(t, marks=SLOW) for t in (torch.bfloat16, torch.float16))]
# A network, one block with and without packed indices, radix passes over memory.
LENGTHS = (40, 300, 5003)
PLACES = ("sm_90", "cuda")


def special(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Return elements of which two thirds are zeros of both signs, NaN, infinities, denormals and largest ones."""
    limits = torch.finfo(dtype)
    few = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, limits.tiny / 4, -limits.tiny / 4, limits.max, limits.min]
    chosen = torch.tensor(few, dtype=torch.float64)[torch.randint(0, len(few), (n,))].to(dtype)
    return torch.where(torch.rand(n) < 0.66, chosen, torch.randn(n).to(dtype))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare values and signs of zeros; NaN equals NaN."""
    got, want = got.cpu(), want.cpu()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if want.is_floating_point():
        zeros = want == 0
        assert torch.equal(got.signbit()[zeros], want.signbit()[zeros])


@emulated
@at(*PLACES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sort(place: str, dtype: torch.dtype, n: int) -> None:
    """Zeros keep their signs and their order, in either direction."""
    torch.manual_seed(n)
    x = special(dtype, n)
    for descending in (False, True):
        want = torch.sort(x, descending=descending, stable=True)
        with taken(place, "sort"):
            got = torch.sort(x.to(device_of(place)), descending=descending, stable=True)
        same(got.indices, want.indices)
        same(got.values, want.values)


def distinct(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what torch's CUDA operator does: a stable sort, and where neighbours are not equal. NaN equals nothing."""
    values, order = torch.sort(x.reshape(-1), stable=True)
    begins = torch.ones(x.numel(), dtype=torch.bool)
    begins[1:] = values[1:] != values[:-1]
    inverse = torch.empty_like(order)
    inverse[order] = begins.cumsum(0) - 1
    return values[begins], inverse.view(x.shape), inverse.bincount()


@emulated
@at(*PLACES)
@pytest.mark.parametrize("first", [0.0, -0.0], ids=["0", "-0"])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_unique(place: str, dtype: torch.dtype, n: int, first: float) -> None:
    """Every NaN is an element of its own, and the zero is the first one: its sign too, with indices and without."""
    torch.manual_seed(n)
    x = special(dtype, n)
    x[torch.nonzero(x == 0)[0]] = first
    want = distinct(x)
    assert want[0].isnan().sum() > 1 and (want[0] == 0).sum() == 1
    for inverse in (False, True):
        for counts in (False, True):
            with taken(place, "sort"):
                got = torch._unique2(x.to(device_of(place)), True, inverse, counts)
            same(got[0], want[0])
            same(got[1], want[1] if inverse else torch.empty(0, dtype=torch.int64))
            same(got[2], want[2] if counts else torch.empty(0, dtype=torch.int64))
            assert got[1] is not got[2]
            assert [part._version for part in got] == [0, 0, 0]


@emulated
@at(*PLACES)
def test_unique_of_bools_is_torchs(place: str) -> None:
    """Torch counts them, and returns counts even if not requested."""
    for x in (torch.rand(3, 5) > 0.5, torch.ones(4, dtype=torch.bool)):
        for how in ((True, False, False), (True, True, True)):
            compare(place, "sort", lambda x, how=how: torch._unique2(x, *how), x, ours=False)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_isin(place: str, dtype: torch.dtype) -> None:
    """NaN is a member of nothing, zeros are equal, infinities are ordinary elements."""
    torch.manual_seed(0)
    x = special(dtype, 90).view(9, 10)
    for n in LENGTHS:
        values = special(dtype, n)
        for chosen in (values, values[~values.isnan()], values[values != 0], values[: n // 8], values.abs()):
            want = (x.view(-1, 1).double() == chosen.double()).any(1).view(9, 10)
            for invert in (False, True):
                with taken(place, "sort"):
                    got = torch.isin(x.to(device_of(place)), chosen.to(device_of(place)), invert=invert)
                assert torch.equal(got.cpu(), want != invert)


@emulated
def test_isin_refuses_what_torch_refuses() -> None:
    bools, few = torch.ones(3, dtype=torch.bool), torch.arange(6.0).view(2, 3).t()
    for args in ((bools, bools), (few, few)):
        with pytest.raises(RuntimeError) as wanted:
            torch.isin(*args)
        with pytest.raises(type(wanted.value)), taken("sm_90", "sort"):
            torch.isin(*args)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("n", [40, 5003])
def test_topk_takes_the_first_of_equal_ones(place: str, n: int) -> None:
    torch.manual_seed(n)
    x = special(torch.float32, n)
    for largest in (False, True):
        want = torch.sort(x, descending=largest, stable=True)
        with taken(place, "sort"):
            got = torch.topk(x.to(device_of(place)), 20, largest=largest)
        same(got.values, want.values[:20])
