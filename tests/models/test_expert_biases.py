"""Experts with biases and alternating columns (GPT-OSS), or without a gate (Nemotron-H).

Rows that no product writes do not reach any sum.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.models import experts

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients


class _Poisoned(torch.autograd.Function):
    """Rows past the last group are NaN in the result, and in the gradient of the input."""

    @staticmethod
    def forward(ctx, x, ends):
        ctx.save_for_backward(ends)
        return _poison(x, ends)

    @staticmethod
    def backward(ctx, dy):
        return _poison(dy, *ctx.saved_tensors), None


def _poison(x: Tensor, ends: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.where((rows < ends[-1])[:, None], x, torch.nan)


def test_the_model_keeps_loss_and_gradients() -> None:
    model = build("gpt_oss")
    for parameter in model.parameters():  # biases that matter
        if parameter.dim() == 2 and parameter.shape[0] == 8:
            nn.init.normal_(parameter, std=0.3)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model)
    assert report.replaced["experts"] == 2
    same_loss, same = loss_and_gradients(model)
    assert same_loss == pytest.approx(loss, rel=1e-6) and largest_error(same, gradients) <= 1e-5


def test_experts_without_a_gate() -> None:
    model = build("nemotron_h")
    (layer,) = (module for module in model.modules() if experts.is_experts(module))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model)
    assert report.replaced["experts"] == 1 and not report.left_alone
    same_loss, same = loss_and_gradients(model)
    assert same_loss == pytest.approx(loss, rel=1e-6) and largest_error(same, gradients) <= 1e-5
    models.unpatch(model)
    layer.act_fn = nn.Tanh()
    reasons = [site.reason for site in models.patch(model).left_alone]
    assert reasons == ["its activation is none of ours"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h"])
def test_rows_that_are_not_written(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of experts on other ranks (expert parallelism) leave rows at the end that products do not write."""
    model = models.patched(lambda: build(name).to(dtype))
    layer = next(module for module in model.modules() if experts.is_experts(module))
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    count = layer.num_experts
    x = torch.randn(12, 64, dtype=dtype)
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(12)])
    chosen[:5, 1] = count  # nobody
    weights = torch.rand(12, 2, dtype=dtype)
    weights[:5, 1] = 0
    grouped = experts._grouped
    results = []
    for poisoned in (False, True):
        if poisoned:

            def product(x, weight, ends, transposed, tokens=None):
                return _Poisoned.apply(grouped(_Poisoned.apply(x, ends), weight, ends, transposed), ends)

            monkeypatch.setattr(experts, "_grouped", product)
        leaf, probs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        layer.zero_grad()
        y = layer(leaf, chosen, probs)
        y.float().square().sum().backward()
        results.append([y.detach(), leaf.grad, probs.grad, *(p.grad.clone() for p in layer.parameters())])
    for clean, other in zip(*results, strict=True):
        assert torch.isfinite(other).all() and torch.equal(clean, other)
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
