"""Muon on DTensors, two processes on gloo: owners compute whole matrices; AdamW's coded moments on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_in_processes
from torch.nn import Parameter

from rtkernels.optim import AdamW, Muon

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")

# Three of a shape: one process owns two of them. 5 rows are no even shards, 1 row leaves one process without any.
SHAPES = ((16, 24), (16, 24), (16, 24), (5, 8), (1, 8), (24, 6), (4, 8, 12))


def _whole(dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype) for shape in SHAPES]


def _set_grads(alone: list[Parameter], shared: list[Parameter], step: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    g = torch.Generator().manual_seed(step)
    for p, q in zip(alone, shared, strict=True):
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)


def _muon(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for dtype in (torch.float32, torch.bfloat16):
        for places in ([Shard(0)], [Shard(1)], [Replicate()]):
            alone = [Parameter(t) for t in _whole(dtype)]
            shared = [Parameter(distribute_tensor(t.clone(), mesh, places)) for t in _whole(dtype)]
            optimizers = [Muon(params, lr=0.1) for params in (alone, shared)]
            for step in range(2):
                _set_grads(alone, shared, step)
                for optimizer in optimizers:
                    optimizer.step()
            for p, q in zip(alone, shared, strict=True):
                tolerance = {"rtol": 2e-2, "atol": 2e-2}
                torch.testing.assert_close(q.full_tensor(), p, **tolerance)
                assert optimizers[1].state[q]["momentum_buffer"].placements == q.placements
                kept = optimizers[1].state[q]["momentum_buffer"].full_tensor()
                torch.testing.assert_close(kept, optimizers[0].state[p]["momentum_buffer"], rtol=1e-6, atol=1e-7)


def _adamw(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    for kind in ("fp32", "8bit", "fp8", "4bit"):
        # 130 rows of 64: shards of 4160 elements, which are no whole blocks of 256.
        whole = torch.randn(130, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        alone, shared = Parameter(whole.clone()), Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        options = {"lr": 1e-2, "state": kind, "master": False, "stochastic": True, "seed": 5}
        optimizers = AdamW([alone], **options), AdamW([shared], **options)
        for step in range(3):
            _set_grads([alone], [shared], step)
            for optimizer in optimizers:
                optimizer.step()
        result = shared.full_tensor()
        if kind == "fp32":
            assert torch.equal(result, alone)  # random numbers belong to elements, not to shards
        assert (result.float() - alone.float()).abs().max() < 0.03
        names = ("state1", "state2") if kind == "8bit" else ("exp_avg", "exp_avg_sq")
        assert optimizers[1].state[shared][names[0]].placements == shared.placements


@pytest.mark.parametrize("test", [_muon, _adamw])
@pytest.mark.one_in(3)
def test_two_processes(test, tmp_path) -> None:
    run_in_processes((test,), tmp_path)
