"""A patched model in fp8 under FSDP2, two processes on gloo: weights are gathered as they are, then quantised."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.0")
fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
        reason="needs gloo and FSDP2",
    ),
]
WORLD = 2


def _worker(rank: int, path: str) -> None:
    from support.tiny_models import build, tokens
    from torch.distributed.device_mesh import init_device_mesh

    from rtkernels import models
    from rtkernels.models import fp8

    fp8._SMALLEST_GAIN = 0
    torch.set_num_threads(1)
    store = f"file://{path}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    try:
        recipe = models.Fp8Recipe(save_weight=True)  # no codes of weights between the passes
        options = {"fp8": recipe, "fused_layers": True}
        alone = models.patched(lambda: build("qwen3").bfloat16(), **options)
        shared = models.patched(lambda: build("qwen3").bfloat16(), **options)
        mesh = init_device_mesh("cpu", (WORLD,))
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
        first, second = [], []
        for name, p in alone.named_parameters():
            first.append(p.grad.flatten().double())
            second.append(whole[name].grad.full_tensor().flatten().double())
        cosine = torch.nn.functional.cosine_similarity(torch.cat(first), torch.cat(second), dim=0)
        assert float(cosine) >= 0.998
    finally:
        dist.destroy_process_group()


def test_fsdp(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_worker, args=(str(tmp_path),), nprocs=WORLD)
