"""A checkpointed step of a patched model has the same bits as one without, whatever is checkpointed and how."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import rtkernels
from rtkernels import models
from rtkernels.errors import RtkError
from rtkernels.models import fp8 as quantized

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, loss_and_gradients, tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

SIZES = {"hidden_size": 128, "intermediate_size": 128}
OPTIONS = {
    "fused": {"fused_layers": True},
    "fp8": {"fp8": True},
    "fp8, fused": {"fp8": True, "fused_layers": True},
    "parts": {"fp8": models.Fp8Recipe(parts=4), "fused_layers": True, "attention": True},
    "parts, input": {"fp8": models.Fp8Recipe(parts=4, save="input", save_weight=True), "fused_layers": True},
}
WAYS = {
    "every layer": {},
    "re-entrant": {"use_reentrant": True},
    "every second": {"every_n_layers": 2},
    "every second, re-entrant": {"every_n_layers": 2, "use_reentrant": True},
    "on the host": {"offload": True},
}


@pytest.fixture(autouse=True)
def _small_layers_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny layers multiply codes, and a machine without pinned memory copy what is saved."""
    from transformers import modeling_utils

    def save_on_cpu(**options: Any) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)

    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    monkeypatch.setattr(modeling_utils, "save_on_cpu", save_on_cpu, raising=False)


def checkpoint(model: nn.Module, use_reentrant: bool = False, **options: Any) -> None:
    """Enable checkpointing of a model's layers, by the name that the installed transformers uses."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    if options.keys() - inspect.signature(enable).parameters.keys():
        pytest.skip("this transformers checkpoints all layers")
    enable({"use_reentrant": use_reentrant}, **options)


def check_bits(model: nn.Module, wanted: tuple[float, dict[str, torch.Tensor]], ids: torch.Tensor) -> None:
    """Compare loss and gradients of a step, bit by bit."""
    loss, found = loss_and_gradients(model, ids, use_cache=False)
    assert loss == wanted[0] and found.keys() == wanted[1].keys()
    assert [name for name, g in wanted[1].items() if not torch.equal(found[name], g)] == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_layers(options: str, way: str) -> None:
    ids = tokens(1, 272) if "parts" in options else tokens(2, 16)
    model = build("qwen3", num_hidden_layers=3, **SIZES).bfloat16()
    models.patch(model, **OPTIONS[options])
    wanted = loss_and_gradients(model, ids)
    seen = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *given: seen.append(1))
    model.model.layers[1].self_attn.register_forward_hook(lambda *given: seen.append(2))
    checkpoint(model, **WAYS[way])
    check_bits(model, wanted, ids)
    assert sorted(seen) == ([1, 1, 2] if "second" in way else [1, 1, 2, 2])  # which layers were recomputed


def test_a_model_that_is_checkpointed_already() -> None:
    ids = tokens(2, 16)
    wanted = loss_and_gradients(models.patched(lambda: build("qwen3", **SIZES).bfloat16(), **OPTIONS["parts"]), ids)
    model = build("qwen3", **SIZES).bfloat16()
    checkpoint(model)
    models.patch(model, **OPTIONS["parts"])
    with rtkernels.nn.fixed_weights(model):
        for _ in range(2):
            check_bits(model, wanted, ids)


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
@pytest.mark.parametrize("options", ["fp8", "fp8, fused", "parts, input"])
def test_a_part_of_a_layer(options: str, part: str) -> None:
    """Codes of a norm reach the checkpointed function, and are found there again in the recomputation."""
    ids = tokens(2, 16)
    model = models.patched(lambda: build("qwen3", **SIZES).bfloat16(), **OPTIONS[options])
    wrappers = [checkpoint_wrapper(getattr(layer, part)) for layer in model.model.layers]
    for layer, wrapper in zip(model.model.layers, wrappers, strict=True):
        setattr(layer, part, wrapper)
    own = wrapper.checkpoint_fn
    for wrapper in wrappers:
        wrapper.checkpoint_fn = lambda function, *args, **kwargs: function(*args, **kwargs)
    wanted = loss_and_gradients(model, ids, use_cache=False)
    for wrapper in wrappers:
        wrapper.checkpoint_fn = own
    check_bits(model, wanted, ids)
    setattr(layer, part, checkpoint_wrapper(wrapper, checkpoint_impl=CheckpointImpl.REENTRANT))
    with pytest.raises(RtkError, match="re-entrant checkpointing of a part of a decoder layer cannot pass them on"):
        loss_and_gradients(model, ids, use_cache=False)


# ---- lazy results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_logits_that_were_looked_at_without_gradients_have_them(mode: Any) -> None:
    model, ids = build("gemma2"), tokens()
    wanted = torch.autograd.grad(model(input_ids=ids).logits.square().mean(), model.lm_head.weight)[0]
    logits = models.patched(lambda: build("gemma2"))(input_ids=ids, labels=ids).logits
    with mode():
        first = logits.argmax(-1)
    assert torch.equal(logits.argmax(-1), first)
    torch.testing.assert_close(torch.autograd.grad(logits.square().mean(), logits.head.weight)[0], wanted)


@pytest.mark.parametrize("options", [{}, {"fused_layers": True}], ids=["patched", "fused"])
def test_norms_that_were_looked_at_without_gradients_have_them(options: dict) -> None:
    recipe, ids = models.Fp8Recipe(skip=("q_proj", "up_proj")), tokens(2, 16)  # which read numbers
    model = models.patched(lambda: build("qwen3", **SIZES).bfloat16(), fp8=recipe, **options)
    wanted = loss_and_gradients(model, ids)

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        assert type(x).__name__ == "LazyNorm"
        with torch.no_grad():
            x.float().norm()

    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_pre_hook(look, with_kwargs=True)
    check_bits(model, wanted, ids)


def test_lazy_results_have_the_operators_of_tensors() -> None:
    ids = tokens(1, 3)
    logits = models.patched(lambda: build("qwen3"))(input_ids=ids, labels=ids).logits
    exact, other = logits.tensor(), torch.randn(128, 2)
    pairs = [
        (logits @ other, exact @ other), (logits**2, exact**2), (2**logits, 2**exact), (1 / logits, 1 / exact),
        (logits > 0, exact > 0), (logits <= 0, exact <= 0), (logits == exact, exact == exact), (logits % 2, exact % 2),
        (logits != 0, exact != 0), (abs(logits), exact.abs()), (other.t() @ logits[0].t(), other.t() @ exact[0].t()),
    ]  # fmt: skip
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert logits in {logits}  # by identity, as tensors are
