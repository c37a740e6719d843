"""Patched models in two processes on gloo against one process: DDP, FSDP2, tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from support.processes import WORLD, run_in_processes, whole
from torch import nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
    reason="needs gloo and FSDP2",
)
_alone: dict[str, Any] = {}


def _wanted(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the unpatched model: one process, all sequences."""
    if kind not in _alone:
        _alone[kind] = loss_and_gradients(build(kind))
    return _alone[kind]


def _check_step(model: nn.Module, kind: str, rank: int | None, prefix: str = "", tolerance: float = 1e-5) -> None:
    """Compare loss and gradients; with a rank, every process has its part of the sequences."""
    loss, gradients = _wanted(kind)
    ids = tokens() if rank is None else tokens().tensor_split(WORLD)[rank]
    got, found = loss_and_gradients(model, ids)
    mean = torch.tensor(got)
    if rank is not None:
        dist.all_reduce(mean)
        mean /= WORLD
    assert mean.item() == pytest.approx(loss, rel=1e-5)
    assert largest_error({n.removeprefix(prefix): whole(g) for n, g in found.items()}, gradients) <= tolerance


def check_ddp(rank: int, mesh: Any) -> None:
    model = models.patched(lambda: build("qwen3"))
    shared = nn.parallel.DistributedDataParallel(model)
    _check_step(shared, "qwen3", rank, prefix="module.")
    ids = tokens().tensor_split(WORLD)[rank]
    assert type(shared(input_ids=ids, labels=ids).logits).__name__ == "LazyLogits"


def _sharded(model: nn.Module, mesh: Any, own_head: bool) -> nn.Module:
    units = [*model.model.layers, *((model.lm_head,) if own_head else ())]
    for unit in units:
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return fsdp.fully_shard(model, mesh=mesh)


def check_fsdp(rank: int, mesh: Any) -> None:
    for kind in ("qwen3", "qwen3_moe"):
        for own_head in (False, True):
            for patched_first in (True, False):
                model = build(kind)
                if patched_first:
                    report = models.patch(model)
                    _sharded(model, mesh, own_head)
                else:
                    _sharded(model, mesh, own_head)
                    report = models.patch(model)
                assert not report.left_alone, str(report)
                _check_step(model, kind, rank)
                ids = tokens()
                logits = model(input_ids=ids, labels=ids).logits  # lazy, and a tensor on access
                assert type(logits).__name__ == "LazyLogits"
                plain = build(kind)(input_ids=ids).logits
                torch.testing.assert_close(logits[0, :2], plain[0, :2], rtol=1e-4, atol=1e-5)


def check_unpatch_of_fsdp(rank: int, mesh: Any) -> None:
    model = _sharded(models.patched(lambda: build("qwen3"), fused_layers=True), mesh, own_head=True)
    models.unpatch(model)  # which stays sharded
    assert all(isinstance(unit, fsdp.FSDPModule) for unit in (*model.model.layers, model.lm_head, model))
    assert not any(hasattr(module, "_rtkernels_kind") for module in model.modules())
    _check_step(model, "qwen3", rank)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _check_step(model, "qwen3", rank)


def check_fsdp_training(rank: int, mesh: Any) -> None:
    updates = []
    for shared in (False, True):
        model = build("qwen3")
        if shared:
            models.patch(_sharded(model, mesh, own_head=True))
            model.gradient_checkpointing_enable({"use_reentrant": False})
        before = [whole(p.detach()).clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            ids = tokens(seed=step)
            ids = ids.tensor_split(WORLD)[rank] if shared else ids
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        updates.append([whole(p.detach()) - b for p, b in zip(model.parameters(), before, strict=True)])
    norm = sum(float(u.square().sum()) for u in updates[0])
    assert sum(float((a - b).square().sum()) for a, b in zip(*updates, strict=True)) <= 1e-6 * norm


def check_plan_of_transformers(rank: int, mesh: Any) -> None:
    if torch.__version__ < "2.13":  # whose DTensors cannot gather what the plans of transformers 5.22 shard
        return
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    def shard(model: Any) -> None:
        if hasattr(model, "_resolve_parallel_plans"):  # from transformers 5.23 on a plan names every module
            from transformers.distributed import DistributedConfig

            apply_tensor_parallelism(model, mesh, model._resolve_parallel_plans(DistributedConfig(tp_size=WORLD))[0])
        else:
            apply_tensor_parallelism(model, mesh)

    wanted = build("llama").eval().generate(tokens(2, 5), max_new_tokens=3, do_sample=False)
    for kind in ("llama", "qwen3_moe"):
        for patched_first in (True, False):
            model = build(kind)
            if patched_first:
                models.patch(model)
                shard(model)
            else:
                shard(model)
                left = models.patch(model).left_alone  # what the plan wraps
                assert "loss" in {site.kind for site in left}, left  # what else, depends on the release of transformers
                assert all("patch first" in site.reason for site in left), left
            _check_step(model, kind, None)
            if kind == "llama":
                model.eval()
                assert torch.equal(model.generate(tokens(2, 5), max_new_tokens=3, do_sample=False), wanted)


def check_plan_of_torch(rank: int, mesh: Any) -> None:
    """Gate and up reach our op, and logits our loss, as DTensors: the vocabulary stays split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"lm_head": ColwiseParallel(use_local_output=False)}
    for i in range(2):
        layer = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        layer |= {f"mlp.{name}_proj": ColwiseParallel(use_local_output=False) for name in ("gate", "up")}
        layer |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan |= {f"model.layers.{i}.{name}": style for name, style in layer.items()}
    for patched_first in (True, False):
        model = build("llama")
        if patched_first:
            models.patch(model)
        parallelize_module(model, mesh, plan)
        report = models.patch(model)
        assert report.replaced["mlp"] == 2 and not report.left_alone, str(report)
        _check_step(model, "llama", None)


CHECKS = (
    check_ddp, check_fsdp, check_unpatch_of_fsdp, check_fsdp_training, check_plan_of_transformers, check_plan_of_torch,
)  # fmt: skip


@pytest.mark.one_in(1000)
def test_two_processes_give_what_one_gives(tmp_path: Any) -> None:
    run_in_processes(CHECKS, tmp_path)
