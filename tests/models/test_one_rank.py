"""FSDP2 and DDP of patched models with one process, gloo on the CPU and NCCL on a GPU: ten losses stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn

from rtkernels import models
from rtkernels.nn import gather_in_fp8

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, tokens

pytestmark = [
    pytest.mark.one_in(3),
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
        reason="needs torch.distributed and FSDP2",
    ),
]
CLOSE = {"cpu": 1e-5, "cuda": 5e-4}  # torch's own kernels on a GPU do not repeat their sums in the same order
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.fixture(params=PLACES)
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    place = request.param
    if place == "cuda":
        torch.cuda.set_device(0)
    backend = {"cpu": "gloo", "cuda": "nccl"}[place]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh(place, (1,))
    finally:
        dist.destroy_process_group()


def model_for(mesh: Any, **options: Any) -> nn.Module:
    model = build("llama", **SIZES).to(mesh.device_type).bfloat16()
    report = models.patch(model, attention=True, **options)
    assert not report.left_alone, str(report)
    return model


def sharded(model: nn.Module, mesh: Any, tail: bool | None = None) -> nn.Module:
    """Shard layers and head; with `tail` final norm and head as one unit, which is freed after its forward or not."""
    for unit in model.model.layers:
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    if tail is None:
        fsdp.fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    else:
        fsdp.fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=tail)
    return fsdp.fully_shard(model, mesh=mesh)


def ten_losses(model: nn.Module, mesh: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(10):
        ids = tokens(2, 33, seed=step).to(mesh.device_type)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fsdp_and_ddp_change_no_loss(mesh: Any) -> None:
    alone = ten_losses(model_for(mesh), mesh)
    shared = sharded(model_for(mesh), mesh)
    assert all(isinstance(unit, fsdp.FSDPModule) for unit in (*shared.model.layers, shared.lm_head, shared))
    assert ten_losses(shared, mesh) == pytest.approx(alone, rel=CLOSE[mesh.device_type])
    replicated = nn.parallel.DistributedDataParallel(model_for(mesh))
    assert ten_losses(replicated, mesh) == pytest.approx(alone, rel=CLOSE[mesh.device_type])
    assert alone[-1] != alone[0]


def test_norm_and_head_as_one_unit(mesh: Any) -> None:
    """As accelerate shards a model. Weights are freed when the unit has been differentiated, so the head runs once."""
    alone = ten_losses(model_for(mesh), mesh)
    for tail in (False, True):
        shared = sharded(model_for(mesh), mesh, tail)
        assert ten_losses(shared, mesh) == pytest.approx(alone, rel=CLOSE[mesh.device_type]), tail
        ids = tokens(2, 5).to(mesh.device_type)
        output = shared(input_ids=ids, labels=ids, use_cache=False)
        assert type(output.logits).__name__ == "LazyLogits"
        with torch.no_grad():
            plain = shared(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(output.logits[0, :2].detach(), plain[0, :2], rtol=1e-2, atol=1e-2)
        output.loss.backward()


def test_fsdp_with_fp8(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections that one product computes together are separate products under FSDP2, with other roundings."""
    monkeypatch.setattr(models.fp8, "_SMALLEST_GAIN", 0)
    recipe = models.Fp8Recipe(save_weight=True)
    alone = ten_losses(model_for(mesh, fp8=recipe, fused_layers=True), mesh)
    shared = model_for(mesh, fp8=recipe, fused_layers=True)
    assert gather_in_fp8(shared, 1) == 0  # a process that has whole weights gathers none
    assert ten_losses(sharded(shared, mesh), mesh) == pytest.approx(alone, rel=3e-3)
