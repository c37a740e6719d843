"""TRL's fused head under FSDP2: the head is called as a module, whose hooks gather its weight, and only then read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import joined, spawn

from integrations.trl_trainers import KINDS
from rtkernels import models

pytest.importorskip("trl", minversion="1.15")


def _model() -> Any:
    import transformers
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS["qwen3"](), attn_implementation="eager")
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    return model


def _step(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities, and the gradient of the head."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    output = model(input_ids=ids, labels=ids.masked_fill(torch.arange(9) < 3, -100), fused_lm_head=True)
    output.loss.backward()
    grad = model.lm_head.weight.grad
    return output.log_probs.detach(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _worker(rank: int, world: int, path: str) -> None:
    from torch.distributed.fsdp import fully_shard

    with joined(rank, path, world):
        wanted = _step(_model())
        for sharded_first in (False, True):
            model = _model()
            if not sharded_first:
                models.use_fused_head(SimpleNamespace(model=model, ref_model=None))
            for module in (*model.model.layers, model.lm_head, model):
                fully_shard(module)
            if sharded_first:
                models.use_fused_head(SimpleNamespace(model=model, ref_model=None))
            assert len(model.lm_head.weight.to_local()) == 32  # half of the vocabulary
            for got, one in zip(_step(model), wanted, strict=True):
                torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)


def test_a_sharded_head(tmp_path: Path) -> None:
    spawn(_worker, 2, tmp_path)
