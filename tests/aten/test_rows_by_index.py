"""Kernels that add to rows and move rows by an index, without torch's operators: layouts, limits, all types."""

from __future__ import annotations

import pytest
import torch
from support.places import at, emulated
from torch import Tensor

import rtkernels
from rtkernels.emulator import EmulatorError
from rtkernels.ops.index import adding, gathering
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Meta

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_ROWS = 65535 * 128  # of one launch: a grid has that many blocks in y


def shifted(x: Tensor, by: int) -> Tensor:
    """Return a dense copy that begins `by` elements after a multiple of 16 bytes."""
    return torch.cat([x.new_zeros(by), x.flatten()])[by:].view(x.shape)


def assert_sums(got: Tensor, want: Tensor) -> None:
    assert got.is_contiguous()
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=step, atol=64 * 2**-24)


@emulated
@at("sm_80", "sm_90")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("columns", "x_off", "source_off", "gap"),
    [
        (64, 0, 0, 0),  # whole vectors
        (64, 0, 0, 8),  # of rows that are apart
        (64, 1, 0, 0),  # x at an odd address
        (64, 0, 3, 0),  # the source
        (64, 0, 0, 1),  # its rows at odd distances
        (33, 0, 0, 0),  # no whole vectors
        (1032, 0, 0, 0),  # several slices of columns
    ],
)
def test_sums_of_any_layout(
    place: str, dtype: torch.dtype, columns: int, x_off: int, source_off: int, gap: int
) -> None:  # fmt: skip
    torch.manual_seed(0)
    rows, tokens = 23, 61
    x = shifted(torch.randn(rows, columns).to(dtype), x_off)
    source = shifted(torch.randn(tokens, columns + gap).to(dtype), source_off)[:, :columns]
    index = torch.randint(0, rows, (tokens,))
    index[20:38], index[38:55] = 7, 6  # more than a warp takes by itself, for two rows of a block
    index[index == 2] = 3  # a row that is not named
    want = x.double().index_add(0, index, source.double(), alpha=0.5)
    from_end = torch.where(torch.rand(tokens) < 0.5, index, index - rows)
    with rtkernels.emulate(place):
        assert adding.addable((rows, columns), index, source, 0)
        assert_sums(adding.add_rows(x, index, source, 0, alpha=0.5), want)
        every_other = torch.stack([from_end, torch.full_like(index, 1 << 40)], 1)[:, 0]
        assert_sums(adding.add_rows(x, every_other, source, 0, alpha=0.5, from_end=True), want)
        own = shifted(x, x_off)
        adding.add_rows(own, from_end.int(), source, 0, alpha=0.5, from_end=True, in_place=True)
        assert_sums(own, want)
        for ignored in (-1, 7, int(index[0])):
            kept = index != ignored
            want = torch.zeros(rows, columns, dtype=torch.float64).index_add(0, index[kept], source[kept].double())
            assert_sums(adding.sum_rows(index, source, rows, ignored), want)


@emulated
def test_rows_that_no_index_names_keep_their_memory() -> None:
    """In place they are not touched: signs of zeros and bits of NaN stay."""
    x = torch.randn(9, 32).bfloat16()
    x.view(torch.int16)[4, :3] = torch.tensor([-32768, 0x7FA5, -0x5B])
    before = x.view(torch.int16).clone()
    with rtkernels.emulate("sm_90"):
        adding.add_rows(x, torch.tensor([2, 8, 2]), torch.ones(3, 32).bfloat16(), 0, in_place=True)
    changed = (x.view(torch.int16) != before).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 8]


@emulated
@pytest.mark.parametrize("bad", [-1, 9, 1 << 33])
def test_an_index_that_is_no_row_stops_the_kernels(bad: int) -> None:
    index, x, source = torch.tensor([1, bad]), torch.randn(9, 64), torch.randn(2, 64)
    for call in (
        lambda: adding.add_rows(x, index, source, 0),
        lambda: gathering.gather(x, index, 0, select=True),
        lambda: gathering.gather(x.t(), index, 1, select=True),
        lambda: gathering.gather(x[:2, :8].contiguous(), torch.full((2, 4), bad), 1),
    ):
        with rtkernels.emulate("sm_90"), pytest.raises(EmulatorError, match="trap"):
            call()


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1, 2**23 - 1, 2**23])
def test_grids_have_room(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index, source = torch.arange(4), torch.randn(4, 16)
    grids = []
    monkeypatch.setattr(Kernel, "bind", lambda self, variant, device, grid, *_: grids.append(grid))
    addable = adding.addable((rows, 16), index, source, 0, in_place=True)
    assert addable == (rows <= MAX_ROWS)
    metas = (Meta(t.dtype, tuple(t.shape), t.stride(), -1, 0) for t in (index, source))
    adding._plan_in_place(Meta(torch.float32, (rows, 16), (16, 1), -1, 0), *metas, 0, False, -1)
    assert (max(grids[0][1:]) <= 65535) == addable


@emulated
@at("sm_80", "sm_90")
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((5, 7, 64), 1),  # several outer entries
        ((9, 1412), 0),  # groups of 96 threads, which leave some of a block idle
        ((3, 4104), 0),  # two slices of a row
        ((2, 3, 20), 1),  # five vectors of a row: one thread has one
    ],
    ids=str,
)
def test_rows_moved_by_groups(place: str, shape: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    longer = torch.randn(*shape[:-1], shape[-1] + 4)
    views = [longer[..., : shape[-1]].contiguous(), longer[..., : shape[-1]], longer[..., 4:], longer[..., 1:-3]]
    if dim:  # rows at multiples of 16 bytes, but not from one outer entry to the next
        views.append(torch.randn(shape[0], shape[1] * shape[2] + 1)[:, :-1].unflatten(1, shape[1:]))
    for x in views:
        index = torch.randint(-shape[dim], shape[dim], (11,))
        with rtkernels.emulate(place):
            got = gathering.gather(x, index.int(), dim, select=True, from_end=True)
        assert torch.equal(got, x.index_select(dim, index % shape[dim]))


@emulated
@at("sm_80", "sm_90")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64], ids=str)
def test_rows_read_as_a_whole(place: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element width; one row per block, with 1024 threads if it is long, or several."""
    monkeypatch.setattr(gathering, "_FEW_ROWS_INDICES", 1 << 20)
    for rows, columns, wanted in ((3, 80 * 1024 // dtype.itemsize, 5204), (21, 48, 20), (1, 16, 4)):
        x = torch.randint(0, 250, (rows, columns + 16)).to(dtype)[:, :columns]
        index = torch.randint(0, columns, (rows, wanted))
        with rtkernels.emulate(place):
            assert torch.equal(gathering.gather(x, index, 1), x.gather(1, index))
            assert torch.equal(gathering.gather(x, index.int(), 1), x.gather(1, index))  # by elements


@emulated
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_elements_beyond_32_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions among so many elements take 64-bit divisions; tested here with few elements."""
    monkeypatch.setattr(gathering, "divisor", lambda n: 0)
    x = torch.randint(0, 250, (5, 6, 7)).to(dtype).permute(2, 0, 1)
    index = torch.randint(0, 7, (3, 5, 6)).transpose(1, 2).contiguous().transpose(1, 2)
    with rtkernels.emulate("sm_90"):
        assert torch.equal(gathering.gather(x, index, 0), x.gather(0, index))
