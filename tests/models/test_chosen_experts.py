"""Llama 4's experts: the chosen ones only, instead of all on all tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

import rtkernels
from rtkernels import models
from rtkernels.models import replace


@pytest.mark.parametrize("top_k", [1, 3])
def test_loss_and_gradients(top_k: int) -> None:
    model = build("llama4_text", num_experts_per_tok=top_k)
    for p in model.parameters():  # the experts of this model begin with zeros
        if p.dim() == 3:
            nn.init.normal_(p, std=0.2)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model)
    assert report.replaced["experts"] == 2 and not report.left_alone
    same_loss, same = loss_and_gradients(model)
    assert same_loss == pytest.approx(loss, rel=1e-6) and largest_error(same, gradients) <= 1e-5
    experts = [name for name in gradients if "experts" in name or "router" in name]
    assert len(experts) == 6 and all(gradients[name].abs().sum() > 0 for name in experts)


def test_each_token_goes_to_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = build("llama4_text", num_experts_per_tok=2, num_hidden_layers=1).bfloat16().eval(), []
    unpatched = copy.deepcopy(model)
    models.patch(model)
    permute = rtkernels.moe_permute
    monkeypatch.setattr(rtkernels, "moe_permute", lambda x, *a, **k: sizes.append(x.shape) or permute(x, *a, **k))
    with torch.no_grad():
        got, want = model(tokens()).logits, unpatched(tokens()).logits
    assert sizes == [(34, 64)]
    assert (got - want).float().norm() < 0.02 * want.float().norm()


def test_hooks_run_the_models_own_code() -> None:
    model, seen = build("llama4_text").eval(), []
    want = model(tokens()).logits
    models.patch(model, norm=False, mlp=False, rope=False)
    layer = model.model.layers[0].feed_forward
    assert replace.replaced(layer).kind == "chosen_experts"
    handle = layer.experts.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model(tokens()).logits, want)
    handle.remove()
    assert seen == [1]
    models.unpatch(model)
    assert torch.equal(model(tokens()).logits, want)
