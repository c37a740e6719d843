"""Sorting on our kernels: in shared memory and by radix, stable in both directions, NaN last; the best of long rows."""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare, numbers, views
from support.places import at, emulated

SLOW = pytest.mark.slow
OTHERS = (torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
DTYPES = [torch.float32, *(pytest.param(t, marks=SLOW) for t in OTHERS)]
PLACES = ("sm_90", "cuda")


@emulated
@at(*PLACES)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stable_sort(place: str, dtype: torch.dtype, descending: bool) -> None:
    for x in [*views(dtype), numbers(dtype, 3, 300), numbers(dtype, 2, 2049), numbers(dtype, 5003)]:
        for dim in range(x.dim()):
            compare(
                place, "sort",
                lambda x, dim=dim: tuple(torch.sort(x, dim=dim, descending=descending, stable=True)), x, rtol=0, atol=0,
            )  # fmt: skip


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(t, marks=SLOW) for t in (torch.bfloat16, torch.int64))]
)
def test_long_rows_by_tiles(place: str, dtype: torch.dtype) -> None:
    """Several tiles in a row, passes that a row leaves out and another does not, and a row of equal elements."""
    torch.manual_seed(0)
    x = torch.randint(-9, 9, (3, 9001)).to(dtype)
    x[1] = torch.randn(9001).mul(1000).to(dtype)
    x[2] = 3
    for descending in (False, True):
        compare(
            place,
            "sort",
            lambda x, d=descending: tuple(torch.sort(x, dim=1, descending=d, stable=True)),
            x,
            rtol=0,
            atol=0,
        )


@emulated
@SLOW
@pytest.mark.parametrize("order", ["reverse", 5])
def test_any_order_of_blocks(order: str | int) -> None:
    import rtkernels
    from rtkernels.ops.sort.sorting import sort_rows

    x = torch.randn(2, 9001)
    with rtkernels.emulate("sm_90", order=order):
        values, indices = sort_rows(x, False)
    wanted = torch.sort(x, stable=True)
    assert torch.equal(values, wanted.values) and torch.equal(indices, wanted.indices)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("largest", [pytest.param(True, marks=SLOW), False])
@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(t, marks=SLOW) for t in OTHERS[:-1])])
def test_topk(place: str, dtype: torch.dtype, largest: bool) -> None:
    for x in [*views(dtype), numbers(dtype, 2, 2500)]:
        for dim in range(x.dim()):
            for k in (1, min(x.shape[dim] // 2, 200)):
                if k:
                    compare(
                        place, "sort", lambda x, dim=dim, k=k: torch.topk(x, k, dim, largest).values, x, rtol=0, atol=0
                    )


@emulated
@at(*PLACES)
@pytest.mark.parametrize(("n", "k"), [(5000, 200), pytest.param(40000, 200, marks=SLOW)])
def test_best_of_long_rows(place: str, n: int, k: int) -> None:
    x = torch.randn(2, n, device="cuda" if place == "cuda" else "cpu")
    compare(place, "sort", lambda x: x.topk(k).values, x, rtol=0, atol=0)
    compare(place, "sort", lambda x: x.gather(1, x.topk(k, largest=False).indices), x, rtol=0, atol=0)


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    ("dtype", "k"), [(torch.float32, 5), *(pytest.param(t, k, marks=SLOW) for t in OTHERS[:-1] for k in (1, 64))]
)
def test_selected_from_long_rows(place: str, dtype: torch.dtype, k: int) -> None:
    """Random rows, all equal ones, a bound that many equal, descending and ascending ones, an odd length with NaN."""
    n = 12301
    rows = numbers(dtype, 5, n)
    rows[1] = 1
    rows[2] = 0
    rows[2, 7000:7003] = 1
    rows[3:] = rows[3:].sort(1).values
    rows[4] = rows[4].flip(0)
    if dtype.is_floating_point:
        rows[0, [5, 4096, 12300]] = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
    for x in (rows, rows[:, : n - 13].contiguous(), rows[:1]):
        for largest in (True, False):
            got = best_of(place, x, k, largest)
            want = torch.sort(x, dim=1, descending=largest, stable=True)
            torch.testing.assert_close(got[0].cpu(), want.values[:, :k], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got[1].cpu(), want.indices[:, :k])


def best_of(place: str, x: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from support.overrides import device_of, taken

    with taken(place, "sort"):
        return torch.topk(x.to(device_of(place)), k, 1, largest)


@emulated
def test_a_row_of_one_is_a_copy() -> None:
    from support.overrides import taken

    x = torch.randn(5, 1)
    with taken("sm_90", "sort"):
        values, _ = x.sort(1)
    assert values.data_ptr() != x.data_ptr()


@emulated
def test_more_than_256_of_long_rows_are_torchs() -> None:
    compare("sm_90", "sort", lambda x: x.topk(300).values, torch.randn(3000), ours=False)


@emulated
@SLOW
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_unique(place: str, dtype: torch.dtype) -> None:
    for x in (numbers(dtype, 7), numbers(dtype, 5, 9).t(), numbers(dtype, 2500)):
        compare(place, "sort", lambda x: torch._unique2(x, True, True, True), x)
        compare(place, "sort", torch._unique2, x)


@emulated
@at(*PLACES)
def test_randperm(place: str) -> None:
    from support.overrides import device_of, taken

    with taken(place, "sort"):
        result = torch.randperm(300, device=device_of(place))
    assert torch.equal(result.sort().values.cpu(), torch.arange(300))


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.int64, marks=pytest.mark.slow)])
def test_isin(place: str, dtype: torch.dtype) -> None:
    x = torch.randint(0, 40, (7, 33)).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -0.0
    for count in (1, 9, 2500):
        values = torch.randint(0, 60, (count,)).to(dtype)
        if dtype.is_floating_point and count > 1:
            values[:2] = torch.tensor([torch.nan, torch.inf])
        for invert in (False, True):
            compare(place, "sort", lambda x, v, invert=invert: torch.isin(x, v, invert=invert), x, values)
    compare(place, "sort", torch.isin, x[:, ::2], x[0, 3:9])


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, pytest.param(torch.bfloat16, marks=SLOW)])
def test_isin_of_a_number(place: str, dtype: torch.dtype) -> None:
    x = torch.randint(0, 40, (7, 33)).to(dtype)
    x[3, 3] = 7
    if dtype.is_floating_point:
        x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -0.0
    for number in (7, 0, 77, *((0.5, torch.inf) if dtype.is_floating_point else ())):
        for invert in (False, True):
            for y in (x, x.t(), x[::2, 1::3], x[3, 3]):
                compare(place, "sort", lambda y, n=number, i=invert: torch.isin(y, n, invert=i), y)
            for y in (x, x[3, 3], x[:1, :1]):
                compare(place, "sort", lambda y, n=number, i=invert: torch.isin(n, y, invert=i), y)


@emulated
@at(*PLACES)
def test_isin_of_a_number_that_torch_keeps(place: str) -> None:
    """A number that no element can equal exactly, NaN, a number of another kind, nothing to compare with."""
    x = torch.tensor([0.1, 2.0, torch.nan] * 20)
    for number in (0.1, torch.nan):
        compare(place, "sort", lambda x, n=number: torch.isin(n, x), x, ours=False)
        compare(place, "sort", lambda x, n=number: torch.isin(x, n), x)
    compare(place, "sort", lambda x: torch.isin(2.5, x), torch.arange(60), ours=False)
    compare(place, "sort", lambda x: torch.isin(x, 259), torch.arange(60, dtype=torch.uint8), ours=False)
    compare(place, "sort", lambda x: torch.isin(3, x, invert=True), torch.zeros(0), ours=False)
