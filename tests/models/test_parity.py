"""Numerical gates: bf16 as close to fp32 as before, twenty equal training steps, and wrong models fail.

Losses and gradients in fp32 are compared in test_patch.py, for many families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rtkernels import models
from rtkernels.models import replace
from rtkernels.models.recognize import Recognized

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, loss_and_gradients, tokens

# ---- bf16 -----------------------------------------------------------------------------------------------------------


class _Routing(TorchFunctionMode):
    """Records which experts are chosen, or repeats choices: other roundings sometimes choose other experts."""

    def __init__(self, chosen: list[Tensor] | None = None) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []
        self._given = None if chosen is None else iter(chosen)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, indices = func(*args, **(kwargs or {}))
        if self._given is not None:
            indices = next(self._given)
            values = args[0].gather(-1, indices)
        self.chosen.append(indices)
        return torch.return_types.topk((values, indices))


def _error_of_bf16(kind: str, patched: bool) -> float:
    """Return how far the gradient of a bf16 model is from that of an fp32 copy of its weights with its routing."""
    model, exact = build(kind).bfloat16(), build(kind).bfloat16().float()
    if patched:
        models.patch(model)
    distance = size = 0.0
    for seed in range(6):  # errors of one small batch vary by a tenth
        with _Routing() as routing:
            got = loss_and_gradients(model, tokens(seed=seed))[1]
        with _Routing(routing.chosen):
            wanted = loss_and_gradients(exact, tokens(seed=seed))[1]
        distance += sum(float((got[n].float() - g).square().sum()) for n, g in wanted.items())
        size += sum(float(g.square().sum()) for g in wanted.values())
    return (distance / size) ** 0.5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "phi3", "glm4", "olmo2", "qwen3_moe"])
def test_bf16_is_as_near_to_fp32_as_before(kind: str) -> None:
    before, now = _error_of_bf16(kind, False), _error_of_bf16(kind, True)
    assert 1e-4 < before < 0.1  # a comparison that says something
    assert now <= 1.05 * before, (now, before)


# ---- training -------------------------------------------------------------------------------------------------------


def _updates(model: nn.Module, steps: int = 20) -> Tensor:
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = tokens(seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])


def _norms(model: nn.Module) -> list[nn.Module]:
    kinds = {m: replace.replaced(m) for m in model.modules()}
    return [module for module, kind in kinds.items() if kind is not None and kind.kind == "rms_norm"]


def _wrong_epsilon(model: nn.Module) -> None:
    for module in _norms(model):
        name = dict(replace.replaced(module).options)["eps"]
        setattr(module, name, 1000 * getattr(module, name))


def _wrong_activation(model: nn.Module) -> None:
    for module in model.modules():
        kind = replace.replaced(module)
        if kind is not None and kind.kind == "mlp":
            options = dict(kind.options)
            options["act"] = "gelu_tanh" if options["act"] == "silu" else "silu"
            replace.restore(module)
            replace.replace(module, Recognized("mlp", tuple(options.items())))


def _wrong_offset(model: nn.Module) -> None:
    for module in _norms(model):
        options = dict(replace.replaced(module).options)
        options["offset"] += 0.02
        replace.restore(module)
        replace.replace(module, Recognized("rms_norm", tuple(options.items())))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_twenty_steps_of_training(kind: str) -> None:
    wanted = _updates(build(kind))

    def distance(change: Callable[[nn.Module], None] | None = None) -> float:
        model = models.patched(lambda: build(kind))
        if change is not None:
            change(model)
        return float((_updates(model) - wanted).norm() / wanted.norm())

    assert distance() <= 1e-3
    wrong = {change.__name__: distance(change) for change in (_wrong_epsilon, _wrong_activation, _wrong_offset)}
    assert min(wrong.values()) > 1e-2, wrong  # what must not pass, does not by far
