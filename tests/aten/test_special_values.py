"""Reductions, scans, windows and sums into rows: NaN, infinities, zeros of both signs and integers at their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.overrides import compare, device_of, taken
from support.places import at, emulated
from torch.testing import assert_close

import rtkernels
from rtkernels.aten import wrapped

INF, NAN = torch.inf, torch.nan
SLOW = pytest.mark.slow
FLOATS = [torch.float32, *(pytest.param(t, marks=SLOW) for t in (torch.bfloat16, torch.float16))]
PLACES = ("sm_90", "cuda")
# (rows, n) reduced along n: one at a time, vectors of a warp, of a block, in slices; (n, columns) along n the same.
ROWS = ((3, 7), (3, 64), (2, 2048), (1, 16384))
COLUMNS = ((7, 3), (64, 8), (2100, 8))


def result(place: str, family: str, function: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the result of our kernel for x, on the CPU."""
    with taken(place, family):
        output = function(x.to(device_of(place)), *args, **kwargs)
    return [t.cpu() for t in output] if isinstance(output, tuple) else output.cpu()


def planes() -> list[tuple[torch.Tensor, int]]:
    """Return zeros of every geometry, with the dimension to reduce."""
    return [(torch.zeros(shape), 1) for shape in ROWS] + [(torch.zeros(shape), 0) for shape in COLUMNS]


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_first_nan_is_the_extreme(place: str, dtype: torch.dtype) -> None:
    """The index of the first NaN of several, wherever they are, also next to infinities."""
    torch.manual_seed(0)
    for x, dim in planes():
        n = x.shape[dim]
        x = torch.randn(x.shape).to(dtype)
        x.select(dim, n // 3).fill_(INF)
        x.select(dim, n // 4).fill_(-INF)
        for first in (1, n - 2):
            nans = x.clone()
            for i in (first, n - 1, (first + n) // 2):
                nans.select(dim, i).fill_(NAN)
            for largest in (True, False):
                index = result(place, "red", torch.argmax if largest else torch.argmin, nans, dim)
                assert (index == first).all()
                value, index = result(place, "red", torch.max if largest else torch.min, nans, dim)
                assert value.isnan().all() and (index == first).all()


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_first_zero_is_the_extreme(place: str, dtype: torch.dtype) -> None:
    """The value of ``max(dim)`` is the element at its index: of zeros of both signs the first, with its sign."""
    for x, dim in planes():
        n = x.shape[dim]
        for sign in (0.0, -0.0):
            for worst, find in ((-1.0, torch.max), (1.0, torch.min)):
                zeros = torch.full(x.shape, worst, dtype=dtype)
                zeros.select(dim, n // 3).fill_(sign)
                zeros.select(dim, n // 2).fill_(-sign)
                zeros.select(dim, n - 1).fill_(-sign)
                value, index = result(place, "red", find, zeros, dim)
                assert (index == n // 3).all()
                assert (value == 0).all() and (value.signbit() == zeros.select(dim, n // 3).signbit()).all()


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, pytest.param(torch.uint8, marks=SLOW)])
def test_extremes_of_integers(place: str, dtype: torch.dtype) -> None:
    """The least and the greatest of a dtype are elements like others, alone and beside one another."""
    limits = torch.iinfo(dtype)
    for x, dim in planes():
        for low, high in ((limits.min, limits.min), (limits.min, limits.max)):
            ends = torch.full(x.shape, low, dtype=dtype)
            ends.select(dim, x.shape[dim] - 2).fill_(high)
            assert (result(place, "red", torch.amin, ends, dim) == low).all()
            assert (result(place, "red", torch.amax, ends, dim) == high).all()
            value, index = result(place, "red", torch.max, ends, dim)
            assert (value == high).all() and (index == (0 if low == high else x.shape[dim] - 2)).all()


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_in_sums(place: str, dtype: torch.dtype) -> None:
    """One infinity is the sum and the mean; two of opposite signs, or a NaN, make NaN; none elsewhere."""
    for x, dim in planes():
        n = x.shape[dim]
        for values, want in (([INF], INF), ([-INF], -INF), ([INF, INF], INF), ([INF, -INF], NAN), ([NAN], NAN)):
            given = torch.ones(x.shape, dtype=dtype)
            for i, value in enumerate(values):
                given.select(dim, (n // 3 + i * (n // 2)) % n).fill_(value)
            for function in (torch.sum, torch.mean):
                output = result(place, "red", function, given, dim)
                torch.testing.assert_close(output, torch.full_like(output, want), rtol=0, atol=0, equal_nan=True)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
def test_variance_of_one_infinity(place: str, value: float) -> None:
    """NaN for the slice that has it, among others or alone, and for no other."""
    torch.manual_seed(0)
    for x, dim in [*planes(), (torch.zeros(3, 1), 1)]:
        given = torch.randn(x.shape)
        other = torch.cat([given] * 2, 1 - dim)
        other.select(dim, x.shape[dim] // 2).select(0, 0).fill_(value)
        for correction in (0, 1) if x.shape[dim] > 1 else (0,):
            output = result(place, "red", torch.var, other, dim, correction=correction)
            assert output[0].isnan() and output[1:].isfinite().all()


@emulated
@at(*PLACES)
@pytest.mark.parametrize("shape", [(3, 40), (2, 5000), (1, 12288), (300, 3)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_in_running_sums(place: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Everything before an infinity is finite, what follows infinite until one of the other sign: then NaN."""
    dim = 0 if shape[0] > 3 else 1
    n = shape[dim]
    x = torch.ones(shape, dtype=dtype) / 64
    x.select(dim, n // 3).fill_(INF)
    x.select(dim, n // 2).fill_(-INF)
    output = result(place, "scan", torch.cumsum, x, dim)
    assert output.narrow(dim, 0, n // 3).isfinite().all()
    assert (output.narrow(dim, n // 3, n // 2 - n // 3) == INF).all()
    assert output.narrow(dim, n // 2, n - n // 2).isnan().all()
    for name in ("cummax", "cummin"):
        compare(place, "scan", lambda v, name=name: tuple(getattr(v, name)(dim)), x)


@emulated
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilation"), [(2, 2, 0, 1), (3, 1, 1, 1), (3, 2, 1, 2), (5, 3, 2, 1)]
)
def test_windows_of_infinities(dtype: torch.dtype, kernel: int, stride: int, pad: int, dilation: int) -> None:
    """The index of a window of -inf is that of its first element, that of one with NaN the last NaN's."""
    torch.manual_seed(0)
    lowest = torch.full((2, 3, 9, 11), -INF).to(dtype)
    mixed = torch.where(torch.rand(lowest.shape) < 0.3, torch.randn(lowest.shape).to(dtype), lowest)
    mixed[0, :, 4:6, 2:7] = NAN
    mixed[1, 0, 3, 5], mixed[1, 1, 3, 5] = INF, NAN
    for x in (lowest, mixed):
        compare(
            "sm_90", "win",
            lambda x: torch.ops.aten.max_pool2d_with_indices(x, [kernel], [stride], [pad], [dilation]), x,
        )  # fmt: skip


@emulated
@at(*PLACES)
def test_upsampling_to_the_same_size_copies(place: str) -> None:
    """Torch ignores the factor of a size that does not change; in the gradient if neither changes."""
    x = torch.randn(2, 3, 6, 7)
    for size in ([6, 7], [12, 7], [6, 14]):
        want = F.interpolate(x, size)
        output = result(place, "win", torch.ops.aten.upsample_nearest2d, x, size, 2.0, 2.0)
        torch.testing.assert_close(output, want, rtol=0, atol=0)
    back = result(place, "win", torch.ops.aten.upsample_nearest2d_backward, x, [6, 7], [2, 3, 6, 7], 2.0, 2.0)
    torch.testing.assert_close(back, x, rtol=0, atol=0)


@emulated
def test_negative_repeats_raise() -> None:
    """Without a size as torch's CPU and CUDA operators do, with one as the CPU's; so does a sum of another size."""
    for repeats, size in (([2, -1, 3], None), ([-1], None), ([1] * 300 + [-5], None), ([2, -1, 3], 4), ([2, 3], 6)):
        given = torch.tensor(repeats)
        with pytest.raises(RuntimeError) as wanted:
            torch.repeat_interleave(given, output_size=size)
        with pytest.raises(type(wanted.value)), taken("sm_90", "scan"):
            torch.repeat_interleave(given, output_size=size)
    with pytest.raises(RuntimeError), taken("sm_90", "copy"):
        torch.ones(3).repeat(-1)


@emulated
@pytest.mark.parametrize(("repeats", "total"), [([2, -1, 3], 4), ([2, 3], 6), ([2, 3], 4)])
def test_repeats_that_nobody_looked_at_stop_the_kernel(repeats: list[int], total: int) -> None:
    import rtkernels
    from rtkernels.ops.scan.compact import repeated

    with pytest.raises(RuntimeError, match="trap"), rtkernels.emulate("sm_90"):
        repeated(torch.tensor(repeats), total)


@emulated
@at(*PLACES)
def test_places_beyond_16_bits(place: str) -> None:
    """Coordinates and elements of slices far from the first, of a dimension with more than 2^16 entries."""
    x = torch.zeros(2, 70_001)
    places = torch.tensor([[0, 0], [0, 65_535], [0, 65_536], [0, 70_000], [1, 4_095], [1, 69_999]])
    x[places[:, 0], places[:, 1]] = torch.arange(1.0, 7)
    compare(place, "scan", torch.nonzero, x)
    compare(place, "scan", lambda x: x.masked_select(x != 0), x)
    compare(place, "scan", torch.nonzero, x.view(-1, 1, 2))
    assert torch.equal(result(place, "scan", torch.nonzero, x), places)


@emulated
@at(*PLACES)
def test_random_numbers_do_not_repeat(place: str) -> None:
    """Counters beyond 16 bits, of elements and of fours of them, give numbers that were not there before."""
    output = result(place, "rng", lambda x: x.uniform_(), torch.empty(4 * 65_536 + 2_048))
    for shift in (65_536, 2 * 65_536, 4 * 65_536):
        equal = (output[shift : shift + 2_048] == output[:2_048]).float().mean()
        assert equal < 0.01, shift
    assert abs(output.mean() - 0.5) < 5 * (1 / 12 / output.numel()) ** 0.5


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_in_sums_of_rows(place: str, dtype: torch.dtype) -> None:
    """They stay in their rows and columns, for few rows and for many."""
    torch.manual_seed(0)
    for tokens, columns in ((9, 32), (9, 3), (9000, 24)):
        x = torch.zeros(6, columns, dtype=dtype)
        index = torch.arange(tokens) % 5
        source = torch.ones(tokens, columns, dtype=dtype) / 1024
        source[1, 0], source[6, 0], source[2, 1], source[3, 2] = INF, -INF, -INF, NAN
        for function in (
            lambda x, i, s: x.index_add(0, i, s),
            lambda x, i, s: x.scatter_add(0, i[:, None].expand(s.shape), s),
            lambda x, i, s: x.clone().index_put_((i,), s, accumulate=True),
        ):
            want = function(x.double(), index, source.double()).to(dtype)  # torch adds in the dtype, step by step
            given = [t.to(device_of(place)) for t in (x, index, source)]
            with taken(place, "idx"):
                output = function(*given)
            if columns > 3:  # a sum of short rows is torch's
                torch.testing.assert_close(output.cpu(), want, rtol=2**-8, atol=0, equal_nan=True)
            assert torch.equal(output.cpu().isnan(), want.isnan()) and torch.equal(output.cpu() == INF, want == INF)


@emulated
@at(*PLACES)
def test_versions_rise_by_one(place: str) -> None:
    """In place once, whichever kernel does it; results are new."""
    for tokens in (9, 9000):
        for name in ("index_add_", "scatter_add_", "index_put_", "index_add", "scatter_add", "sort", "unique", "clone"):
            x = torch.zeros(6, 24, device=device_of(place))
            index = (torch.arange(tokens) % 5).to(x.device)
            source = torch.ones(tokens, 24, device=x.device)
            wide = index[:, None].expand(tokens, 24)
            arguments = {
                "index_add": (0, index, source), "scatter_add": (0, wide, source),
                "index_put": ((index,), source, True),
                "sort": (0,), "unique": (True, True), "clone": (),
            }[name.rstrip("_")]  # fmt: skip
            for _ in range(3):  # the second is a replay
                before = x._version
                with taken(place, ["idx", "sort", "copy"]):
                    output = getattr(x, name)(*arguments)
                in_place = name.endswith("_")
                output = output[0] if isinstance(output, tuple) else output
                assert x._version == before + in_place, name
                assert output is x if in_place else output._version == 0, name


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_searchsorted_of_a_number(place: str, dtype: torch.dtype) -> None:
    """Torch wraps the number as a tensor of the device and converts it, which no override may see there."""
    x = torch.arange(9).to(dtype)
    order = torch.arange(9, device=device_of(place))
    for number in (2, 2.5, True, -1.0, 300, 1 / 3, torch.nan, torch.inf):
        compare(place, "copy", lambda x, n=number: torch.searchsorted(x, n), x, ours=False)
        compare(place, "copy", lambda x, n=number: torch.searchsorted(x, n, side="right", sorter=order), x, ours=False)
        compare(place, "copy", lambda x, n=number: torch.bucketize(n, x, out_int32=True, right=True), x, ours=False)
        out = torch.empty((), dtype=torch.int64, device=device_of(place))
        compare(place, "copy", lambda x, n=number, out=out: torch.searchsorted(x, n, out=out).clone(), x, ours=False)


@emulated
@pytest.mark.parametrize("name", ["_to_copy", "copy_"])
def test_conversions_see_no_wrapped_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would wrap comes as a tensor wherever conversions are taken: an override of them gets no number."""
    seen: list[object] = []
    search = torch.searchsorted
    with taken("sm_80", name):
        monkeypatch.setattr(torch, "searchsorted", lambda *args, **how: seen.append(args[1]) or search(*args, **how))
        torch.ops.aten.searchsorted.Scalar(torch.arange(9.0), 2.5)
    assert [isinstance(value, torch.Tensor) for value in seen] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("base", [2, 0.5, -1, True, 1.0])
def test_powers_of_a_number_as_a_tensor(dtype: torch.dtype, base: float) -> None:
    """What CUDA overrides call in place of torch's ``pow(number, tensor)``, which hands them a marked CUDA tensor."""
    function = wrapped.CALLS["pow.Scalar"].function
    for shape in ((5,), ()):
        exponent = torch.arange(5).to(dtype) if shape else torch.tensor(3).to(dtype)
        assert_close(function(base, exponent), torch.pow(base, exponent))


@pytest.mark.gpu
def test_powers_of_a_number_while_powers_are_taken() -> None:
    exponent = torch.linspace(1, 8, 64, device="cuda")
    want = 0.5**exponent
    for name in ("pow.Tensor_Tensor_out", "pow"):
        with rtkernels.use(name):
            assert_close(0.5**exponent, want)
            torch.pow(0.5, exponent, out=torch.empty_like(exponent))
        assert_close(0.5**exponent, want)
