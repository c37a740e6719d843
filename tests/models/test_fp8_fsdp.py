"""fp8 under FSDP2, two processes on gloo: weights gathered and then quantised, or gathered as codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import WORLD, run_in_processes
from torch import nn

from rtkernels.errors import ArgumentError
from rtkernels.nn import Fp8Linear, gather_in_fp8

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
    reason="needs gloo and FSDP2",
)

def _patched_model(rank: int, mesh: Any) -> None:
    from support.tiny_models import build, tokens

    from rtkernels import models
    from rtkernels.models import fp8

    fp8._SMALLEST_GAIN = 0
    recipe = models.Fp8Recipe(save_weight=True)  # no codes of weights between the passes
    options = {"fp8": recipe, "fused_layers": True}
    alone = models.patched(lambda: build("qwen3").bfloat16(), **options)
    shared = models.patched(lambda: build("qwen3").bfloat16(), **options)
    for layer in shared.model.layers:
        fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fsdp.fully_shard(shared, mesh=mesh)
    ids = tokens()  # the same in every process, so that codes are the same, too
    losses = []
    for model in (alone, shared):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    whole = dict(shared.named_parameters())
    first = torch.cat([p.grad.flatten().double() for p in alone.parameters()])
    names = [name for name, _ in alone.named_parameters()]
    second = torch.cat([whole[name].grad.full_tensor().flatten().double() for name in names])
    assert float(nn.functional.cosine_similarity(first, second, dim=0)) >= 0.998
    shared.zero_grad()
    shared.gradient_checkpointing_enable({"use_reentrant": False})
    shared(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert torch.equal(torch.cat([whole[name].grad.full_tensor().flatten().double() for name in names]), second)
    later = build("qwen3").bfloat16()
    fsdp.fully_shard(later, mesh=mesh)
    models.patch(later, fp8=True)  # weights already gathered: the same recipe by default
    assert dict(later.model.layers[0].mlp.down_proj._rtkernels_kind.options)["recipe"] == recipe


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "save_weight": True}
    return nn.Sequential(Fp8Linear(128, 512, **options), nn.GELU(), Fp8Linear(512, 256, bias=False, **options))


def _gathered_codes(rank: int, mesh: Any) -> None:
    alone, shared = _layers(), _layers()
    assert gather_in_fp8(shared, WORLD) == 2 and gather_in_fp8(_layers(), 4) == 1
    seen = []
    for i in (0, 2):
        fsdp.fully_shard(shared[i], mesh=mesh, reshard_after_forward=True)
        shared[i].register_forward_pre_hook(lambda layer, given: seen.append(type(layer.weight).__name__))
    fsdp.fully_shard(shared, mesh=mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (alone, shared)]
    for step in range(2):
        x = torch.randn(24, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
        results = []
        for model in (alone, shared):
            y = model(x)
            y.float().square().mean().backward()
            results.append(y.detach())
        assert torch.equal(*results), step  # shards are whole blocks: the same codes
        for one, other in zip(shared.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(_whole(one.grad), other.grad, rtol=1e-2, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert set(seen) == {"GatheredCodes"}


def _whole(t: Any) -> torch.Tensor:
    result = t.full_tensor()
    return getattr(result, "data_", result)


@pytest.mark.slow
def test_a_patched_model(tmp_path: Any) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    run_in_processes((_patched_model,), tmp_path)


@pytest.mark.slow
def test_codes_are_gathered(tmp_path: Any) -> None:
    run_in_processes((_gathered_codes,), tmp_path)


def test_a_gathered_weight_gives_its_codes() -> None:
    """The same bits as from the weight, forward and backward; other recipes are refused."""
    import rtkernels
    from rtkernels.nn.fp8_gather import Fp8GatherWeight, GatheredCodes

    torch.manual_seed(0)
    weight, x = torch.randn(256, 128).bfloat16(), torch.randn(20, 128).bfloat16()
    sent, _ = Fp8GatherWeight(weight).fsdp_pre_all_gather(None)
    result, memory = Fp8GatherWeight(weight).fsdp_post_all_gather(sent, None, torch.bfloat16)
    assert [t.data_ptr() for t in memory] == [t.data_ptr() for t in sent]
    found = []
    for parameter in (nn.Parameter(weight), nn.Parameter(result)):
        leaf = x.clone().requires_grad_()
        y = rtkernels.fp8_linear(leaf, parameter, save_weight=True)
        y.float().square().sum().backward()
        found.append((y, leaf.grad, parameter.grad))
    assert isinstance(parameter, GatheredCodes) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert float((result + 0 - weight).norm() / weight.norm()) < 0.04
    with pytest.raises(ArgumentError, match="expected recipe 'block', not 'row'"):
        rtkernels.fp8_linear(x, parameter, recipe="row")
    with pytest.raises(ArgumentError, match="shards is 0"):
        gather_in_fp8(nn.Linear(2, 2), 0)
    assert gather_in_fp8(_layers(), 1) == 0 and gather_in_fp8(_layers(), 2) == 2
