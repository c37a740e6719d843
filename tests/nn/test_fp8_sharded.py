"""The fp8 layers in two processes on gloo: FSDP2, and column- and row-parallel layers by DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compare import relative_error
from support.processes import run_in_processes
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.nn import Fp8HadamardLinear, Fp8Linear, Fp8MoE, Fp8SmoothLinear

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
    reason="needs gloo and FSDP2",
)
WORLD = 2


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Fp8Linear(64, 192), nn.GELU(), Fp8Linear(192, 64, save_weight=True), Fp8Linear(64, 64, recipe="row"),
        Fp8HadamardLinear(64, 64), Fp8SmoothLinear(64, 64), Fp8MoE(64, 64, 4, 2),
    )  # fmt: skip


def _fsdp_worker(rank: int, mesh: Any) -> None:
    alone, shared = _model(), _model()
    for layer in shared:
        if any(True for _ in layer.parameters()):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fsdp.fully_shard(shared, mesh=mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (alone, shared)]
    for step in range(3):
        # Every process gets the same tokens, so that codes are the same too; gradients are then means of equals.
        x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(step))
        for model in (alone, shared):
            model(x).square().mean().backward()
        if step == 0:
            for one, other in zip(shared.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-3, atol=1e-4)
    state = {name: t.full_tensor() for name, t in shared.state_dict().items() if hasattr(t, "full_tensor")}
    assert set(state) == {name for name, _ in alone.named_parameters()}


@pytest.mark.one_in(3)
def test_training_with_fsdp(tmp_path: Any) -> None:
    run_in_processes((_fsdp_worker,), tmp_path)


def _parallel_worker(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Mlp(nn.Module):
        def __init__(self, kind: type[nn.Linear]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = kind(128, 256), kind(256, 128)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    alone, shared = Mlp(Fp8Linear), Mlp(Fp8Linear)
    parallelize_module(shared, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(3, 10, 128)
    found = []
    for model in (alone, shared):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        found.append([y.detach(), leaf.grad, *grads])
    for one, other in zip(*found, strict=True):  # shards of 128 have the blocks of the whole, sums another order
        assert relative_error(one, other) < 0.02

    # Placements by hand: whole weights with sharded rows, and x that lies otherwise than the weight needs it.
    weight, bias = torch.randn(64, 128) / 8, torch.randn(64)
    whole = rtkernels.fp8_linear(x, weight, bias)
    cases = {
        (Shard(0), Replicate(), Replicate()): Shard(0),
        (Shard(2), Replicate(), Replicate()): Replicate(),
        (Shard(1), Shard(0), Shard(0)): Shard(2),
        (Replicate(), Shard(1), Replicate()): Replicate(),
    }
    for (of_x, of_weight, of_bias), of_y in cases.items():
        given = [
            distribute_tensor(t.clone(), mesh, [place]).detach().requires_grad_()
            for t, place in ((x, of_x), (weight, of_weight), (bias, of_bias))
        ]
        y = rtkernels.fp8_linear(*given)
        assert y.placements in ((of_y,), (Partial(),)), (of_x, of_weight, y.placements)
        assert relative_error(y.full_tensor(), whole) < 0.03
        y.full_tensor().sum().backward()
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        rtkernels.fp8_linear(*leaves).sum().backward()
        for one, other in zip(given, leaves, strict=True):
            assert relative_error(one.grad.full_tensor(), other.grad) < 0.05, (of_x, of_weight)
    with pytest.raises(ArgumentError, match="expected x, weight and bias to be DTensors if one of them is"):
        rtkernels.fp8_linear(x, given[1])


@pytest.mark.one_in(3)
def test_tensor_parallel_layers(tmp_path: Any) -> None:
    run_in_processes((_parallel_worker,), tmp_path)
