"""patch() among other libraries and modes: wrappers, hooks of accelerate, Liger applied later, caller modes."""

from __future__ import annotations

import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from rtkernels import models
from rtkernels.errors import RtkError

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

# ---- wrappers -------------------------------------------------------------------------------------------------------


def test_data_parallel_is_unwrapped() -> None:
    model = build("llama")
    classes = [type(m) for m in model.modules()]
    wrapped = nn.DataParallel(model)
    report = models.patch(wrapped)
    assert report.replaced["loss"] == 1 and models.report(wrapped) is report is models.report(model)
    with models.loss_only(wrapped):
        pass
    models.unpatch(wrapped)
    assert models.report(wrapped) is None and [type(m) for m in model.modules()] == classes


def test_a_replica_of_data_parallel_computes_the_same() -> None:
    """Replicas are shallow copies whose parameters are plain attributes."""
    model = models.patched(lambda: build("qwen3_moe"), router=True)
    wanted = model(input_ids=tokens(), labels=tokens()).loss
    replica = _replica(model)
    assert replica(input_ids=tokens(), labels=tokens()).loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def _replica(model: nn.Module) -> nn.Module:
    """Return the result of ``torch.nn.parallel.replicate``, which needs GPUs."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                setattr(copy, name, copies[child])
        for name, p in module._parameters.items():
            setattr(copy, name, None if p is None else p.detach().clone().requires_grad_())
    return copies[model]


# ---- accelerate -----------------------------------------------------------------------------------------------------


def _dispatched(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """Return a model with modules hooked as by ``device_map``, and a function that removes the hooks."""
    accelerate = pytest.importorskip("accelerate")
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "cpu"}
    devices |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = accelerate.dispatch_model(build(kind), devices, main_device="cpu", force_hooks=True)
    assert "forward" in model.model.norm.__dict__
    return model, lambda m: accelerate.hooks.remove_hook_from_module(m, recurse=True)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_modules_hooked_by_a_device_map_are_patched(kind: str) -> None:
    plain = build(kind)
    loss, gradients = loss_and_gradients(plain)
    wanted = models.patch(plain).replaced
    model, remove = _dispatched(kind)
    report = models.patch(model)
    assert report.replaced == wanted and not report.left_alone, report
    calls = []
    norm = model.model.norm
    norm._hf_hook.pre_forward = lambda module, *args, **kwargs: (calls.append(1), (args, kwargs))[1]
    again, same = loss_and_gradients(model)
    assert calls and again == pytest.approx(loss, rel=1e-5) and largest_error(same, gradients) <= 1e-5
    assert norm._old_forward.__func__ is type(norm).forward
    models.unpatch(model)
    assert norm._old_forward.__func__ is type(norm).forward and not hasattr(type(norm), "_rtkernels_kind")
    assert loss_and_gradients(model)[0] == loss
    remove(model)


def test_weights_that_are_loaded_for_each_call() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain = build("qwen3")
    loss = loss_and_gradients(plain)[0]
    model = build("qwen3")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.norm.weight.device.type == "meta"
    assert not models.patch(model).left_alone
    out = model(input_ids=tokens(), labels=tokens())
    assert out.loss.item() == pytest.approx(loss, rel=1e-5) and type(out.logits).__name__ == "LazyLogits"


def test_hooks_removed_between_patch_and_unpatch() -> None:
    model, remove = _dispatched("qwen3")
    loss = loss_and_gradients(model)[0]
    models.patch(model)
    remove(model)
    assert loss_and_gradients(model)[0] == pytest.approx(loss, rel=1e-5)
    models.unpatch(model)
    assert not any(hasattr(type(m), "_rtkernels_kind") for m in model.modules())
    assert loss_and_gradients(model)[0] == loss


def test_a_forward_of_ones_own_is_left_alone() -> None:
    model = build("llama")
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: 2 * x, norm)
    (site,) = models.patch(model).left_alone
    assert site.name == "model.norm" and "replaced on the instance" in site.reason


# ---- Liger behind us ------------------------------------------------------------------------------------------------


def _with_liger(module: nn.Module) -> None:
    """Patch a module as Liger patches those of a model."""

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    module.forward = types.MethodType(forward, module)


def test_liger_after_patch_is_noticed() -> None:
    model = build("llama")
    report = models.patch(model)
    count = report.replaced["norm"]
    _with_liger(model.model.norm)
    with pytest.warns(UserWarning, match=r"Liger patched this model after rtkernels: 1 modules \(model\.norm, "):
        model(input_ids=tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=tokens())  # one time
    assert report.replaced["norm"] == count - 1
    (site,) = models.report(model).left_alone
    assert site.name == "model.norm" and site.reason == "Liger replaced its forward after patch"
    with pytest.raises(RtkError, match="Liger patched this model after rtkernels"):
        models.patch(model, strict=True)
    with pytest.warns(UserWarning, match="unpatch: Liger patched this model .*, which stays"):
        models.unpatch(model)
    assert not model._forward_pre_hooks


def test_the_check_of_the_first_call_leaves_nothing_behind() -> None:
    model = models.patched(lambda: build("llama"), loss=False)
    other = pickle.loads(pickle.dumps(model))
    for m in (model, other):
        assert len(m._forward_pre_hooks) == 1
        m(input_ids=tokens())
        assert not m._forward_pre_hooks
    models.unpatch(model)


# ---- modes ----------------------------------------------------------------------------------------------------------


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _coarse() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


MODES: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: _default(torch.bfloat16),
    "float64": lambda: _default(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "deterministic": _deterministic,
    "meta": lambda: torch.device("meta"),
    "medium": _coarse,
}


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_of_the_caller_change_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = build("qwen3_moe", num_hidden_layers=1), build("qwen3_moe", num_hidden_layers=1)
    wanted = models.patch(plain, router=True)
    monkeypatch.setattr(import_module("rtkernels.models.patcher"), "_answers", {})  # modules are tested again
    state, before = torch.get_rng_state(), torch.get_default_dtype()
    with MODES[mode]():
        during = torch.get_default_dtype()
        report = models.patch(model, router=True)
        assert torch.get_default_dtype() == during
    assert report.replaced == wanted.replaced and not report.left_alone, report
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == before
