"""Memory that only a patched layer may reuse: same gradients, also if the graph is kept or a hook reads the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rtkernels import models
from rtkernels.errors import ArgumentError
from rtkernels.models import fp8 as quantized
from rtkernels.models import reuse

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens


def _gradients(model: nn.Module, passes: int = 1, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = tokens()[:, :16] if ids is None else ids
    loss = nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    for i in range(passes):
        loss.backward(retain_graph=i + 1 < passes)
    return {name: p.grad / passes for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{}, {"fused_layers": True}], ids=["patched", "fused"])
def test_a_kept_graph_can_be_differentiated_twice(options: dict) -> None:
    model = build("qwen3")
    wanted = _gradients(model)
    models.patch(model, loss=False, **options)
    assert largest_error(_gradients(model), wanted) <= 1e-5
    assert largest_error(_gradients(model, passes=2), wanted) <= 1e-5


def test_a_gated_mlp_of_codes_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    taken, own = [], quantized.gated_mlp
    monkeypatch.setattr(quantized, "gated_mlp", lambda *args: taken.append(args) or own(*args))

    def gradients_of(**recipe: Any) -> dict[str, torch.Tensor]:
        model = build("qwen3", hidden_size=128, intermediate_size=128).bfloat16()
        models.patch(model, loss=False, fp8=models.Fp8Recipe(**recipe), fused_layers=True)
        found = _gradients(model)
        assert largest_error(_gradients(model, passes=2), found) == 0.0  # a graph that is kept
        return found

    one = gradients_of()
    assert len(taken) == 4
    assert largest_error(gradients_of(save_weight=True), one) == 0.0
    assert largest_error(gradients_of(save="input"), one) == 0.0
    monkeypatch.setattr(quantized, "_as_one_step", lambda *args: None)
    exact, steps = _gradients(build("qwen3", hidden_size=128, intermediate_size=128)), gradients_of()
    assert largest_error(steps, one) > 0.0  # gradients of gate and up were rounded to bf16 first
    errors = [sum(float((g[name] - t).square().sum()) for name, t in exact.items()) for g in (one, steps)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_fp8_has_the_same_bits(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = build("qwen3", hidden_size=128, intermediate_size=128, num_hidden_layers=1).bfloat16()
    models.patch(model, fp8=True, fused_layers=True)
    loss, gradients = loss_and_gradients(model, tokens(2, 16))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    found, others = loss_and_gradients(model, tokens(2, 16))
    assert found == loss and all(torch.equal(others[name], g) for name, g in gradients.items())


@pytest.mark.parametrize("more", [{}, {"save_weight": True, "save": "input"}], ids=["codes", "input"])
def test_a_gated_mlp_in_parts(more: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)

    ids = tokens(2, 152)  # 304 rows: parts of 256 and 48, of 128, 128 and 48

    def patched(parts: int) -> nn.Module:
        model = build("qwen3", hidden_size=128, intermediate_size=128).bfloat16()
        recipe = models.Fp8Recipe(parts=parts, **more)
        models.patch(model, loss=False, fp8=recipe, fused_layers=True)
        return model

    def run_in_parts(parts: int) -> tuple[float, dict[str, torch.Tensor]]:
        return loss_and_gradients(patched(parts), ids)

    loss, gradients = run_in_parts(1)
    for parts in (2, 3):
        found, others = run_in_parts(parts)
        assert found == loss and all(torch.equal(others[name], g) for name, g in gradients.items())
    if not more:
        model = patched(3)
        assert largest_error(_gradients(model, 2, ids), _gradients(model, 1, ids)) == 0.0  # a graph that is kept
    with pytest.raises(ArgumentError, match="fp8 has parts 0; expected a positive integer"):
        run_in_parts(0)


def test_gradients_are_written_over_what_the_layer_made_itself() -> None:
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    halves = gate * 1.0, up * 1.0
    before = [t.detach().clone() for t in halves]
    reuse.glu(*halves, act="silu").sum().backward()
    assert all(torch.equal(t.detach(), leaf.grad) for t, leaf in zip(halves, (gate, up), strict=True))
    y = nn.functional.silu(before[0].requires_grad_()) * before[1].requires_grad_()
    y.sum().backward()
    torch.testing.assert_close(gate.grad, before[0].grad)
    torch.testing.assert_close(up.grad, before[1].grad)


def test_what_somebody_looks_at_stays() -> None:
    model = models.patched(lambda: build("qwen3"), loss=False)
    seen = []
    projection = model.model.layers[0].mlp.gate_proj
    projection.register_forward_hook(lambda module, args, output: seen.append((output, output.detach().clone())))
    _gradients(model)
    assert all(torch.equal(output, copy) for output, copy in seen) and len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_that_hands_its_input_on(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 16, dtype=dtype, requires_grad=True), torch.rand(16, dtype=dtype, requires_grad=True)
    y, same = reuse.NormAndInput.apply(x, weight, 1e-6, 0.0, True)
    (3.0 * y + 2.0 * same).sum().backward()
    leaf, gain = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (3.0 * nn.functional.rms_norm(leaf, (16,), gain, 1e-6) + 2.0 * leaf).sum().backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(x.grad.double(), leaf.grad, **tolerance)
    torch.testing.assert_close(weight.grad.double(), gain.grad, **tolerance)


def test_what_the_activation_gives_is_freed() -> None:
    linear, x = nn.Linear(8, 4, bias=False), torch.randn(2, 3, 8, requires_grad=True)
    wanted = torch.autograd.grad(linear(x).square().sum(), (x, linear.weight))
    for keep in (True, False):
        given = x * 1.0
        loss = reuse.project(linear, given).square().sum()
        for got, exact in zip(torch.autograd.grad(loss, (x, linear.weight), retain_graph=keep), wanted, strict=True):
            torch.testing.assert_close(got, exact)
        assert (given.untyped_storage().nbytes() > 0) == keep
    with_bias = nn.Linear(8, 4)
    given = x * 1.0
    reuse.project(with_bias, given).sum().backward()
    assert given.untyped_storage().nbytes() > 0 and with_bias.bias.grad is not None
