"""Models that generate before and after they are patched."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.models.generation import loop
from support.tiny_models import build

ONLY_ATTENTION = dict.fromkeys(("norm", "mlp", "rope", "loss", "experts"), False)
WINDOW = {"sliding_window": 6}
KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "qwen2": {},
    "qwen3_moe": {},
    "gpt_oss": WINDOW,
}


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    return build(kind, **KINDS[kind]).to(dtype).eval()


def padded(batch: int = 3, length: int = 9) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, : 4 - 3 * row] = 0
    return {"attention_mask": mask}


def patched(model: nn.Module) -> models.PatchReport:
    return models.patch(model, attention=True, **ONLY_ATTENTION)


def both(model: nn.Module, prompt: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return what the model generates before and after it is patched, from the same random numbers."""
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(model.generate(prompt, **options))
        patched(model)
    return results[0], results[1]


def programs(model: nn.Module) -> list:
    return loop.steps_of(model)


def check(model: nn.Module, prompt: Tensor, **options) -> None:
    """Compare the tokens, and require that the steps ran over our cache."""
    wanted, got = both(model, prompt, **options)
    assert torch.equal(got, wanted)
    assert not models.report(model).not_captured
    assert sum(program.count for program in programs(model)) == wanted.shape[1] - prompt.shape[1] - 1
