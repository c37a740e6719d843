"""Results of patched modules may be changed in place, as those of the model's own modules may."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels import models
from rtkernels.models import fp8 as quantized
from rtkernels.models import fp8_linear, replace
from rtkernels.models.recognize import Recognized

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, loss_and_gradients


@pytest.mark.parametrize("options", [{"fused_layers": True}, {"fp8": True}], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2"])
def test_results_of_replaced_modules(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = build(kind).bfloat16() if "fp8" in options else build(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gpt2 has nothing that could be fused
        models.patch(model, loss=False, **options)
    changed = []

    def in_place(_: Any, args: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            result.mul_(0.5)
            changed.append(result)

    def copied(_: Any, args: Any, result: Any) -> Any:
        return result * 0.5 if isinstance(result, Tensor) else None

    found = []
    for hook in (copied, in_place):
        handles = [m.register_forward_hook(hook) for m in model.modules() if replace.replaced(m) is not None]
        found.append(loss_and_gradients(model))
        for handle in handles:
            handle.remove()
    assert len(changed) >= 4 and found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], gradient) for name, gradient in found[0][1].items())


@pytest.mark.parametrize("shape", [(32, 32), (2, 16, 32)])
@pytest.mark.parametrize("recipe", ["block", "row", "tensor"])
def test_fp8_linear(recipe: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    linear = torch.nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    linear.weight = torch.nn.Parameter(weight.detach())
    replace.replace(linear, Recognized("fp8_linear", (("recipe", fp8_linear.check_recipe(recipe)),)))
    for call, w in (
        (lambda: rtkernels.fp8_linear(x, weight, recipe=recipe), weight),
        (lambda: linear(x), linear.weight),
    ):
        x.grad = w.grad = None
        call().mul(3.0).sum().backward()
        wanted, x.grad, w.grad = (x.grad, w.grad), None, None
        y = call()
        assert y.shape == (*shape[:-1], 48) and not y._is_view()
        y.mul_(3.0)
        y.sum().backward()
        assert all(torch.equal(a, b) for a, b in zip((x.grad, w.grad), wanted, strict=True))
