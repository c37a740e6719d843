"""Tables of addresses: the emulator follows them with its checks, and the cache of tables knows when a list changed."""

from __future__ import annotations

import numpy
import pytest
import torch
from support.emulator_harness import ORDERS, needs_compiler, run

import rtkernels
from rtkernels import emulator
from rtkernels.emulator import EmulatorError
from rtkernels.runtime.launch import tables as tables_module
from rtkernels.runtime.launch.tables import Tables, TensorList


def table_of(tensors: list[torch.Tensor], *, declared: bool = True) -> torch.Tensor:
    """Return addresses of tensors, declared to the emulator."""
    table = torch.tensor([t.data_ptr() for t in tensors] + [0])
    if declared:
        emulator.points_to(table, dict(enumerate(tensors)))
    return table


def sizes_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.numel() for t in tensors])


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_kernels_follow_addresses(order: str | int) -> None:
    base = torch.arange(100.0)
    tensors = [torch.ones(7), base[20:30], base[24:60], base, torch.zeros(3)]  # some of them overlap
    out = torch.full((5,), torch.nan)
    with rtkernels.emulate(order=order):
        run("tables.cu", "sum_each", table=table_of(tensors), sizes=sizes_of(tensors), out=out, n=5)
    assert torch.equal(out, torch.stack([t.sum() for t in tensors]))


@needs_compiler
def test_results_reach_the_tensors_and_the_table_stays() -> None:
    tensors = [torch.zeros(64), torch.zeros(8), torch.full((128,), 2.0)]
    table = table_of(tensors)
    before = table.clone()
    run("tables.cu", "add_one", grid=3, table=table, sizes=sizes_of(tensors))
    assert all((t == t[0]).all() for t in tensors) and [float(t[0]) for t in tensors] == [1.0, 1.0, 3.0]
    assert torch.equal(table, before)


@needs_compiler
def test_a_written_table_keeps_its_addresses() -> None:
    tensors = [torch.zeros(4)]
    table = table_of(tensors)
    run("tables.cu", "write_table", block=1, table=table, at=1)
    assert table.tolist() == [tensors[0].data_ptr(), 5]


@needs_compiler
def test_access_past_the_end_of_a_target_is_reported() -> None:
    whole = torch.ones(100)
    tensors = [torch.ones(7), whole[:40]]
    sizes = torch.tensor([7, 41])  # the memory behind is there, but not the tensor's
    with pytest.raises(EmulatorError) as caught:
        run("tables.cu", "sum_each", table=table_of(tensors), sizes=sizes, out=torch.zeros(2), n=2)
    error = caught.value
    assert (error.kind, error.buffer, error.offset, error.size) == ("out_of_bounds", "table[1]", 160, 4)
    assert "at byte 160 of table[1] (float32 [40], 160 bytes): 0 bytes past its end" in str(error)


@needs_compiler
def test_misaligned_target_is_reported() -> None:
    tensors = [torch.ones(9)[1:]]
    with pytest.raises(EmulatorError) as caught:
        run("tables.cu", "add_one", table=table_of(tensors), sizes=sizes_of(tensors))
    assert (caught.value.kind, caught.value.buffer) == ("misaligned", "table[0]")


@needs_compiler
def test_undeclared_addresses_are_no_tensors() -> None:
    tensors = [torch.ones(7)]
    table = table_of(tensors, declared=False)
    with pytest.raises(EmulatorError, match="far from every tensor"):
        run("tables.cu", "sum_each", table=table, sizes=sizes_of(tensors), out=torch.zeros(1), n=1)


@needs_compiler
def test_many_targets() -> None:
    tensors = [torch.full((3,), float(i)) for i in range(1500)]
    out = torch.empty(1500)
    run("tables.cu", "sum_each", table=table_of(tensors), sizes=sizes_of(tensors), out=out, n=1500)
    assert torch.equal(out, 3 * torch.arange(1500.0))


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["guards", "plain"])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tables, list]:
    """Tables that count how often they are built, with and without torch's metadata guards."""
    if request.param == "plain":
        monkeypatch.setattr(tables_module, "TensorGuards", None)
    calls: list = []

    def build(lists: list, device: int) -> object:
        calls.append([list(tensors) for tensors in lists])
        return object()

    return Tables(build), calls


def test_a_list_is_found_again(built: tuple[Tables, list]) -> None:
    tables, calls = built
    tensors = [torch.ones(3), torch.ones(2, 2), torch.ones(0)]
    first = tables.find((tensors,))
    assert tables.find((list(tensors),)) is first
    assert tables.find((tuple(t.detach() for t in tensors),)) is first  # other objects, same memory and metadata
    assert len(calls) == 1
    assert tables.find((tensors, tensors)) is not first


def test_every_change_is_noticed(built: tuple[Tables, list]) -> None:
    tables, calls = built
    whole = torch.ones(64)
    a, last = whole[:16], torch.ones(4)
    variants = [
        [a, last],
        [whole[:32:2], last],  # same address, size and dtype; other strides
        [whole[:8], last],
        [a.view(torch.int32), last],
        [a.view(4, 4), last],
        [a, whole[:4], last],
        [a, whole[4:8], last],
        [last, a],
    ]
    for tensors in variants:
        assert tables.find((tensors,)) is tables.find((tensors,)) is tables.find((tensors,))
    assert len(calls) == len(variants)
    a.data = torch.ones(16)
    tables.find(([a, last],))
    assert len(calls) == len(variants) + 1


def test_tables_keep_no_tensor_alive(built: tuple[Tables, list]) -> None:
    import weakref

    tables, calls = built
    tensors = [torch.ones(3), torch.ones(5)]
    alive = weakref.ref(tensors[0])
    tables.find((tensors,))
    calls.clear()
    del tensors
    assert alive() is None


def test_the_cache_is_bounded(built: tuple[Tables, list]) -> None:
    tables, _ = built
    kept = [[torch.ones(1)] for _ in range(3 * tables_module._TABLES_LIMIT)]
    for tensors in kept:
        tables.find((tensors,))
    assert len(tables._slots) <= tables_module._TABLES_LIMIT + 1


def test_tensor_list_is_a_tuple() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    listed = TensorList(tensors)
    assert isinstance(listed, tuple) and len(listed) == 2 and listed[1] is tensors[1]


def test_upload_for_the_emulator_is_the_table_itself() -> None:
    words = numpy.arange(4)
    target = torch.ones(2)
    table = tables_module.upload(words, -1, lambda: {0: target})
    assert table.dtype == torch.int64 and table.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_upload_is_ordered_by_its_stream() -> None:
    words = numpy.arange(100_000)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            table = tables_module.upload(words, torch.cuda.current_device(), dict)
            total = table.sum()
        stream.synchronize()
        assert int(total) == int(words.sum())


@pytest.mark.gpu
def test_upload_by_a_graph_outlives_everything() -> None:
    device = torch.cuda.current_device()
    tables_module.upload(numpy.arange(10), device, dict)
    out = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(tables_module.upload(numpy.arange(1000), device, dict).sum())
    for _ in range(3):
        junk = torch.full((1 << 20,), -1, device="cuda")
        out.zero_()
        graph.replay()
        assert int(out) == 499500
        del junk
