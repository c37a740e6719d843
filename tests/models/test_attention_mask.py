"""patch(attention=True): a batch without padding needs no mask, and finding that out does not synchronise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rtkernels import models
from rtkernels.models import known_masks

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of the function that waits for the device."""
    from transformers.masking_utils import find_packed_sequence_indices as own

    calls: list[int] = []
    name = "transformers.masking_utils.find_packed_sequence_indices"
    monkeypatch.setattr(name, lambda positions: calls.append(1) or own(positions))
    return calls


def compared(model: nn.Module, options: dict, **inputs) -> tuple[float, float]:
    """Return how far loss and gradients of a patched model are from the original ones."""
    loss, gradients = loss_and_gradients(model, use_cache=False, **inputs)
    models.patch(model, attention=True, **options)
    patched_loss, patched = loss_and_gradients(model, use_cache=False, **inputs)
    return abs(patched_loss / loss - 1), largest_error(patched, gradients)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_nobody_looks_at_positions(kind: str, looked_at: list[int]) -> None:
    model = build(kind)
    model.config.sliding_window = None
    errors = compared(model, {"fused_layers": kind == "qwen3"}, output_router_logits=True)
    assert max(errors) <= 1e-5
    assert len(looked_at) == 1  # before it was patched
    models.unpatch(model)
    loss_and_gradients(model, use_cache=False)
    assert len(looked_at) == 2 and not model.model._forward_pre_hooks


def test_16_bits(looked_at: list[int]) -> None:
    model = build("qwen3").bfloat16()
    assert compared(model, {"fused_layers": True})[0] <= 1e-2 and len(looked_at) == 1
    again = copy.deepcopy(model)
    assert loss_and_gradients(again, use_cache=False)[0] == loss_and_gradients(model, use_cache=False)[0]
    assert len(looked_at) == 1


def test_where_a_mask_may_be_needed(looked_at: list[int]) -> None:
    packed = torch.cat([torch.arange(9), torch.arange(8)])[None].expand(2, -1)
    assert max(compared(build("qwen3"), {}, position_ids=packed)) <= 1e-5 and len(looked_at) == 2
    padding = torch.ones(2, 17, dtype=torch.long)
    padding[0, :5] = 0
    assert max(compared(build("llama"), {}, attention_mask=padding)) <= 1e-5
    model = build("mistral")
    model.config.sliding_window = 4
    assert max(compared(model, {})) <= 1e-5 and len(looked_at) == 3  # a window is known without looking
    kinds = {"full_attention", "sliding_attention"}
    model = build("gemma3_text", sliding_window=4, layer_types=sorted(kinds))
    masks = known_masks._masks_of(model.config, model.model, tokens(), None)
    assert masks.keys() == kinds and (masks["full_attention"].left, masks["sliding_attention"].left) == (-1, 3)
    model.config.use_bidirectional_attention = True
    assert known_masks._masks_of(model.config, model.model, tokens(), None) is None
    assert known_masks._masks_of(model.config, nn.Linear(1, 1), tokens(), None) is None  # a forward nobody knows


def test_another_attention_later(looked_at: list[int]) -> None:
    model = models.patched(lambda: build("qwen3"), attention=True)
    wanted = loss_and_gradients(model, use_cache=False)[0]
    model.set_attn_implementation("eager")
    assert loss_and_gradients(model, use_cache=False)[0] == pytest.approx(wanted, rel=1e-5) and len(looked_at) == 1
    with torch.no_grad():
        assert model.eval()(tokens(), use_cache=False, output_attentions=True).attentions is not None
