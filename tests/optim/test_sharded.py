"""DTensors, two processes on gloo: optimizer and clipping on FSDP2's shards, norms under sequence parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_in_processes
from torch import Tensor

import rtkernels
from rtkernels.optim import AdamW, clip_grad_norm_

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
    reason="needs gloo and FSDP2",
)
WORLD = 2


def _model(dtype: torch.dtype) -> torch.nn.Module:
    """A model with sizes that two processes cannot share evenly."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(9, 7), rtkernels.nn.RMSNorm(7), torch.nn.Linear(7, 1), rtkernels.nn.LayerNorm(1)
    return torch.nn.Sequential(*layers).to(dtype)


def _inputs(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(step)).to(dtype)


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _fsdp_worker(rank: int, mesh: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        alone, shared = _model(dtype), _model(dtype)
        for layer in shared:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(shared, mesh=mesh)
        optimizers = [AdamW(model.parameters(), lr=0.05) for model in (alone, shared)]
        for step in range(4):
            norms = []
            for model, optimizer in zip((alone, shared), optimizers, strict=True):
                x = _inputs(step, dtype)
                mine = x if model is alone else x.tensor_split(WORLD)[rank]
                model(mine).float().square().mean().add(model(mine).float().mean()).backward()
                norms.append(clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
            assert type(norms[1]) is Tensor
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.02}
            torch.testing.assert_close(norms[1], norms[0], **tolerance)
            for one, other in zip(shared.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one.full_tensor(), other, **tolerance)
        state = optimizers[1].state[shared[0].weight]
        assert state["exp_avg"].placements == shared[0].weight.placements
        if dtype == torch.bfloat16:
            torch.testing.assert_close(state["master"].full_tensor().bfloat16(), shared[0].weight.full_tensor())
        again = AdamW(shared.parameters(), lr=0.05)
        again.load_state_dict(optimizers[1].state_dict())
        for name, value in state.items():
            torch.testing.assert_close(_whole(again.state[shared[0].weight][name]), _whole(value), rtol=0, atol=0)


@pytest.mark.one_in(3)
def test_training_with_fsdp(tmp_path: Any) -> None:
    run_in_processes((_fsdp_worker,), tmp_path)


def _clip_worker(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    whole = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2), torch.randn(3)]

    def parameters() -> list[Any]:
        shards = [distribute_tensor(torch.zeros_like(t), mesh, [Replicate()]) for t in whole[:3]]
        shards = [torch.nn.Parameter(p) for p in (*shards, torch.zeros(3))]
        shards[0] = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
        shards[0].grad = distribute_tensor(whole[0], mesh, [Shard(0)])
        shards[1].grad = distribute_tensor(whole[1], mesh, [Replicate()])
        shards[2].grad = DTensor.from_local(whole[2] / WORLD, mesh, [Partial()])
        shards[3].grad = whole[3].clone()
        return shards

    for kind in (2.0, 1.0, math.inf):
        for max_norm in (0.5, 100.0):
            plain = [torch.nn.Parameter(torch.zeros_like(t)) for t in whole]
            for p, grad in zip(plain, whole, strict=True):
                p.grad = grad.clone()
            wanted = torch.nn.utils.clip_grad_norm_(plain, max_norm, kind)
            shards = parameters()
            norm = clip_grad_norm_(shards, max_norm, kind, error_if_nonfinite=True)
            assert type(norm) is Tensor
            torch.testing.assert_close(norm, wanted)
            for p, other in zip(shards, plain, strict=True):
                torch.testing.assert_close(_whole(p.grad), other.grad)
    shards = parameters()
    if rank == 1:
        shards[0].grad.to_local()[0] = math.nan  # which the other process learns of
    assert clip_grad_norm_(shards, 1.0, math.inf).isnan()
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradients is nan"):
        clip_grad_norm_(shards, 1.0, error_if_nonfinite=True)


def test_norm_of_shards_is_that_of_the_whole(tmp_path: Any) -> None:
    run_in_processes((_clip_worker,), tmp_path)


def _sequence_worker(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    for make in (rtkernels.nn.RMSNorm, rtkernels.nn.LayerNorm):
        for with_residual in (False, True):
            torch.manual_seed(0)
            alone, model = (torch.nn.ModuleDict({"norm": make(8)}) for _ in range(2))
            parallelize_module(model, mesh, {"norm": SequenceParallel()})
            x = torch.randn(3, 6, 8, requires_grad=True)
            shards = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
            g = torch.randn(3, 6, 8)
            results = []
            for norm, inputs, grad in (
                (alone["norm"], x, g),
                (model["norm"], shards, distribute_tensor(g, mesh, [Shard(1)])),
            ):
                if with_residual:  # of both results
                    y, total = rtkernels.ops.norm.rms_norm.rms_norm(inputs, norm.weight, residual=2 * inputs)
                    torch.autograd.backward([y, total], [grad, grad])
                else:
                    y = norm(inputs)
                    y.backward(grad)
                results.append([y, inputs.grad, *(p.grad for p in norm.parameters() if p.grad is not None)])
            assert results[1][0].placements == (Shard(1),)
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(_whole(other), one)
    step = AdamW(model.parameters(), lr=0.1)  # of gradients that are terms of a sum, as they come
    before = [_whole(p).clone() for p in model.parameters()]
    step.step()
    for p, old in zip(model.parameters(), before, strict=True):
        if p.grad is not None:
            reference = torch.nn.Parameter(old)
            reference.grad = _whole(p.grad)
            torch.optim.AdamW([reference], lr=0.1).step()
            torch.testing.assert_close(_whole(p), reference)


@pytest.mark.one_in(3)
def test_norms_under_sequence_parallelism(tmp_path: Any) -> None:
    run_in_processes((_sequence_worker,), tmp_path)
