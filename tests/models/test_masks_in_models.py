"""attention=True in whole models: windows, padding and packed batches as in eager attention, without a matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.models import attention
from rtkernels.models.mask_form import MaskForm

pytest.importorskip("transformers", minversion="5.17")

from support.tiny_models import build, largest_error, tokens

pytestmark = pytest.mark.one_in(3)  # whole models: a second each

KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5},
    "qwen3": {},
    "olmo2": {},
    "deepseek_v3": {"first_k_dense_replace": 2},  # rounding changes which experts are chosen
}
LENGTH = 17
_LEFT, _RIGHT = torch.ones(2, LENGTH, dtype=torch.long), torch.ones(2, LENGTH, dtype=torch.long)
_LEFT[0, :5] = _RIGHT[1, -6:] = 0
_POSITIONS = torch.cat([torch.arange(9), torch.arange(8)])[None]
_ENDS = torch.tensor([0, 9, 17], dtype=torch.int32)
BATCHES: dict[str, dict[str, Any]] = {
    "causal": {},
    "left": {"attention_mask": _LEFT},
    "right": {"attention_mask": _RIGHT},
    "packed": {"position_ids": _POSITIONS.expand(2, -1)},
    "packed, by ends": {"position_ids": _POSITIONS},
}
COLLATED = {"cu_seq_lens_q": _ENDS, "cu_seq_lens_k": _ENDS, "max_length_q": 9, "max_length_k": 9}


def step(model: nn.Module, inputs: dict[str, Any], ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of tokens that are no padding, and gradients of the loss of these."""
    valid = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    predicted = valid & valid.roll(1, 1)  # padding predicts nothing: its rows are not the same everywhere
    model.zero_grad()
    out = model(input_ids=ids, labels=ids.masked_fill(~predicted, -100), use_cache=False, **inputs)
    out.loss.backward()
    gradients = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    return (out.logits + 0)[valid].float().detach(), gradients


@pytest.fixture
def no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a mask became a matrix")

    monkeypatch.setattr(attention, "_bias", refuse)
    monkeypatch.setattr(MaskForm, "_make", refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_as_eager(kind: str, no_matrix: None) -> None:
    """Errors against eager attention in fp32 are those of eager attention in 16 bits."""
    whole, half, ours = build(kind, **KINDS[kind]), build(kind, **KINDS[kind]), build(kind, **KINDS[kind])
    whole.load_state_dict(half.bfloat16().state_dict())  # the same weights, rounded
    for model in (whole, half):
        model.set_attn_implementation("eager")
    models.patch(ours.bfloat16(), attention=True, fused_layers=True)
    for name, inputs in BATCHES.items():
        if kind == "gpt_oss" and name.startswith("packed"):
            continue  # its masks do not depend on positions
        ids = tokens(1 if name == "packed, by ends" else 2, LENGTH)
        (logits, gradients), (rough, rounded) = step(whole, inputs, ids), step(half, inputs, ids)
        got, found = step(ours, inputs | (COLLATED if name == "packed, by ends" else {}), ids)
        assert (got - logits).norm() <= 1.5 * (rough - logits).norm() + 2e-3 * logits.norm(), name
        assert largest_error(found, gradients) <= 1.5 * largest_error(rounded, gradients) + 2e-2, name


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_mask_of_the_caller(kind: str) -> None:
    model = build(kind, **KINDS[kind]).bfloat16()
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[1, :, 8:, 3] = False
    inputs = {"attention_mask": mask if kind == "llama" else dict.fromkeys(model.config.layer_types, mask)}
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = model(tokens(), use_cache=False, **inputs).logits.float()
        models.patch(model, attention=True)
        got = model(tokens(), use_cache=False, **inputs).logits.float()
        other = model(tokens(), use_cache=False).logits.float()
    assert (got - wanted).norm() <= 2e-2 * wanted.norm() < (other - wanted).norm() + 2e-2 * wanted.norm()


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_beyond_a_window(kind: str, cache: str, no_matrix: None) -> None:
    model = build(kind, **KINDS[kind]).half().eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    options |= {} if cache == "dynamic" else {"cache_implementation": "static"}
    wanted = model.generate(tokens(2, 4), **options)
    models.patch(model, attention=True)
    assert torch.equal(model.generate(tokens(2, 4), **options), wanted)


def test_a_prompt_in_parts() -> None:
    """The second part of a prompt attends to a cache, left padding and a window included."""
    from transformers import DynamicCache

    ids, padding = tokens(2, LENGTH), _LEFT
    for kind in ("llama", "mistral"):
        model, results = build(kind, **KINDS[kind]).bfloat16().eval(), []
        for patched in (False, True):
            if patched:
                models.patch(model, attention=True)
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(ids[:, :9], attention_mask=padding[:, :9], past_key_values=cache)
                out = model(ids[:, 9:], attention_mask=padding, past_key_values=cache)
            results.append(out.logits.float())
        assert (results[0] - results[1]).norm() <= 2e-2 * results[0].norm()
