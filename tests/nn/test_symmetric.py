"""Signals and sums over memory of several GPUs: two ranks in the emulator, one on a GPU."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at, emulated

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.nn.symmetric import SymmetricBuffer, all_reduce_mm
from rtkernels.ops.multi.symmetric_memory import SLOTS

HALVES = (torch.bfloat16, torch.float16)


def _ranks(count: int, *size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[SymmetricBuffer]:
    """Return the buffers of several ranks of one process."""
    tensors = [torch.randn(size, device=device).to(dtype) for _ in range(count)]
    pads = [torch.zeros(SLOTS * count, dtype=torch.int32, device=device) for _ in range(count)]
    return [SymmetricBuffer(tensors, pads, rank) for rank in range(count)]


@emulated
@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("size", [(3, 5), (4, 8), (1,), (1030, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_over_ranks(size: tuple[int, ...], dtype: torch.dtype, place: str) -> None:
    with running_on(place) as device:
        ranks = _ranks(3, *size, dtype=dtype, device=device)
        for wanted in (torch.float32, *HALVES) if dtype == torch.float32 else (dtype,):
            expected = torch.zeros(size, device=device)
            for r in ranks:
                expected = expected + r.tensor.float()
            results = [r.sum(wanted) for r in ranks]
            for y in results:
                assert y.dtype == wanted
                assert torch.equal(y, expected.to(wanted))


@emulated
@at("cpu", "sm_90", "cuda")
def test_signals_are_counted(place: str) -> None:
    with running_on(place) as device:
        ranks = _ranks(2, 4, device=device)
        pads = ranks[0]._kept[1]
        for _ in range(2):  # one rank is a round ahead
            ranks[0].arrive(3)
        assert [p.tolist().count(2) for p in pads] == [1, 1]
        ranks[1].arrive(3)
        for r in ranks:
            r.wait(3)
        ranks[1].arrive(3)
        for r in ranks:
            r.wait(3)
        assert all(not p.any() for p in pads)


@at("cpu", "sm_90", "cuda")
def test_a_product_of_one_rank(place: str) -> None:
    with running_on(place) as device:
        (buffer,) = _ranks(1, 5, 24, device=device)
        x, w = torch.randn(5, 40, device=device).bfloat16(), torch.randn(24, 40, device=device).bfloat16()
        bias = torch.randn(24, device=device)
        for _ in range(2):
            y = all_reduce_mm(x, w, buffer, bias=bias)
            exact = x.double() @ w.double().t() + bias.double()
            torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-3)
        assert not buffer._kept[1][0].any()


@emulated
@at("sm_90", "cuda")
def test_a_product_over_two_ranks(place: str) -> None:
    """The steps of ``all_reduce_mm``, of both ranks in turns: in one stream a barrier would wait for itself."""
    from rtkernels import scaled_mm

    with running_on(place) as device:
        ranks = _ranks(2, 5, 24, device=device)
        x, w = torch.randn(5, 80, device=device).bfloat16(), torch.randn(24, 80, device=device).bfloat16()
        for r, left, right in zip(ranks, x.chunk(2, 1), w.chunk(2, 1), strict=True):
            scaled_mm(left, right, out=r.tensor)
            r.arrive(0)
        results = []
        for r in ranks:
            r.wait(0)
            results.append(r.sum(torch.bfloat16))
        assert torch.equal(*results)
        torch.testing.assert_close(results[0].double(), x.double() @ w.double().t(), rtol=2**-8, atol=1e-3)


@pytest.mark.gpu
def test_memory_of_torch(tmp_path) -> None:
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        try:  # torch's own calls, so that an error of ours is none of these
            own = symmetric.empty(4, dtype=torch.float32, device="cuda")
            symmetric.rendezvous(own, dist.group.WORLD)
        except RuntimeError as error:
            pytest.skip(f"torch has no symmetric memory here: {error}")
        buffer = SymmetricBuffer.allocate(7, 96, group=dist.group.WORLD)
        x, w = torch.randn(7, 64, device="cuda").bfloat16(), torch.randn(96, 64, device="cuda").bfloat16()
        y = all_reduce_mm(x, w, buffer)
        torch.testing.assert_close(y.double(), x.double() @ w.double().t(), rtol=2**-8, atol=1e-3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = all_reduce_mm(x, w, buffer)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(y.double(), x.double() @ w.double().t(), rtol=2**-8, atol=1e-3)
    finally:
        dist.destroy_process_group()


def test_bad_arguments() -> None:
    t, pad = torch.zeros(4), torch.zeros(SLOTS, dtype=torch.int32)
    for tensors, pads, rank, named in (
        ([], [], 0, "0 tensors"), ([t], [pad], 1, "rank 1"), ([t.long()], [pad], 0, "int64"),
        ([t], [pad[:2]], 0, "pad"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=named):
            SymmetricBuffer(tensors, pads, rank)
    buffer = SymmetricBuffer([t], [pad], 0)
    with pytest.raises(ArgumentError, match="slot is 8"):
        buffer.arrive(SLOTS)
    with pytest.raises(ArgumentError, match="buffer has shape"):
        all_reduce_mm(torch.zeros(2, 3), torch.zeros(4, 3), buffer)
    with pytest.raises(RtkError, match="a rank has not signalled"):
        buffer.wait()
    with pytest.raises(ArgumentError, match="dtype is"):
        buffer.sum(torch.int32)
