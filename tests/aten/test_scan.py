"""Scans of aten on our kernels: running sums and extremes, compaction, repeated indices."""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare, device_of, numbers, taken, views
from support.places import at, emulated

import rtkernels
from rtkernels.ops.scan.running import running

SLOW = pytest.mark.slow
DTYPES = [torch.float32, *(pytest.param(t, marks=SLOW) for t in (torch.bfloat16, torch.int64, torch.int32, torch.bool))]
PLACES = ("sm_90", "cuda")
FUNCTIONS = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cummax": lambda x, d: tuple(x.cummax(d)),
    "cummin": lambda x, d: tuple(x.cummin(d)),
}


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cumsum", pytest.param("cummax", marks=SLOW), pytest.param("cummin", marks=SLOW)])
def test_running(place: str, dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(0)
    for x in views(dtype):
        for dim in range(x.dim()):
            if dtype == torch.bfloat16 and name == "cumsum":  # torch rounds every step, ours the results
                x = x.to(device_of(place))
                with taken(place, "scan"):
                    got = x.cumsum(dim)
                torch.testing.assert_close(got, x.float().cumsum(dim).bfloat16(), equal_nan=True)
            else:
                compare(place, "scan", lambda x, dim=dim: FUNCTIONS[name](x, dim), x)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("shape", [(2, 300), (1, 9001), (1, 12288), (300, 3), (2, 140, 2)], ids=str)
@pytest.mark.parametrize("name", ["cumsum", pytest.param("cummax", marks=SLOW)])
def test_long_ones_in_slices(place: str, shape: tuple[int, ...], name: str) -> None:
    x = numbers(torch.float32, *shape)
    compare(place, "scan", lambda x: FUNCTIONS[name](x, len(shape) - 1 if shape[0] < 3 else 0), x, rtol=1e-4, atol=1e-3)
    if len(shape) == 3:
        compare(place, "scan", lambda x: FUNCTIONS[name](x, 1), x, rtol=1e-4, atol=1e-4)


@emulated
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32, torch.uint8], ids=str
)
@pytest.mark.parametrize(("rows", "n"), [(9, 48), (2, 4112), (1, 20480)])
def test_running_over_vectors(dtype: torch.dtype, rows: int, n: int) -> None:
    """Whole vectors of every type by a warp, a block and slices; the same from odd addresses, one by one."""
    torch.manual_seed(0)
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    longer = numbers(dtype, rows, n + 16)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}.get(dtype, 0.0)
    for x in (longer[:, :n].contiguous(), longer[:, 16:], longer[:, 8:-8], longer[:, 1:-15]):
        with rtkernels.emulate("sm_90"):
            sums, _ = running(x, "sum", 1)
            for flip in (False, True):
                found, places = running(x, "maximum", 1, flip=flip)
                want, wanted = x.to(exact).cummin(1) if flip else x.to(exact).cummax(1)
                assert torch.equal(found.to(exact), want) and torch.equal(places, wanted)
        torch.testing.assert_close(sums.to(exact), x.to(exact).cumsum(1), rtol=step, atol=n * 2**-20 if step else 0)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compaction(place: str, dtype: torch.dtype) -> None:
    for x in [*views(dtype), numbers(dtype, 3, 3001)]:
        x = x.where(torch.rand(x.shape) > 0.3, torch.zeros((), dtype=dtype))
        if x.dim():
            compare(place, "scan", lambda x: x.nonzero(), x)
        compare(place, "scan", lambda x, mask: x.masked_select(mask), x, torch.rand(x.shape) > 0.5)
    compare(place, "scan", lambda x: (x * 0).nonzero(), numbers(dtype, 9) if dtype != torch.bool else torch.zeros(9))


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.int64, pytest.param(torch.int32, marks=SLOW)])
def test_repeats(place: str, dtype: torch.dtype) -> None:
    for n in (1, 5, 300):
        repeats = torch.randint(0, 4, (n,), dtype=dtype)
        repeats[-1] = 2  # an empty result is torch's
        compare(place, "scan", torch.repeat_interleave, repeats)
        total = int(repeats.sum())
        compare(place, "scan", lambda r, total=total: torch.repeat_interleave(r, output_size=total), repeats)


@emulated
@at(*PLACES)
def test_cumsum_into(place: str) -> None:
    compare(place, "scan", lambda x: torch.cumsum(x, 1, out=torch.empty(6, 4, device=x.device).t()), torch.randn(4, 6))


@emulated
@at(*PLACES)
def test_cumsum_into_its_own_operand(place: str) -> None:
    """All of it, or, which torch refuses on the CPU, a part."""
    memory = torch.randn(40, device=device_of(place))
    x = memory[:24].view(3, 8)
    want = x.cumsum(0)
    with taken(place, "scan"):
        if place != "cuda":
            with pytest.raises(RuntimeError, match="refer to a single memory location"):
                torch.cumsum(x, 0, out=memory[4:28].view(3, 8))
        assert torch.cumsum(x, 0, out=x) is x
    torch.testing.assert_close(x, want)
