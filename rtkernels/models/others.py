"""Detect what other packages do to a model: Liger, Unsloth, kernels of the Hugging Face Hub, accelerate's fp8."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from rtkernels.errors import RtkError

_OTHERS = {"liger_kernel": "Liger", "unsloth": "Unsloth", "unsloth_zoo": "Unsloth"}


def _maker(function: Any) -> str | None:
    """Return the name of the model-patching package that a function belongs to, None for any other function."""
    return _OTHERS.get((getattr(function, "__module__", None) or "").partition(".")[0])


def check_foreign(model: nn.Module, fp8: bool) -> None:
    """Raise an RtkError if another package patched the model, either this instance or its class, or is about to."""
    if fp8:
        check_accelerate()
    if getattr(model, "use_kernels", False):
        raise RtkError(
            "model uses kernels of the hub (use_kernels=True), which replace the same modules: turn them off"
        )
    for _, _, sentence in foreign(model):
        raise RtkError(sentence)


def check_accelerate() -> None:
    """Raise an RtkError if accelerate converts linear layers to fp8, as ``patch(fp8=)`` does."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if state is not None and state._shared_state.get("_mixed_precision") == "fp8":
        raise RtkError(
            'accelerate has mixed_precision="fp8", which replaces the linear layers that patch(fp8=) replaces. Use '
            'mixed_precision="bf16" with patch(fp8=True), or patch without fp8='
        )


def foreign(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the modules with a forward from another package: path, package and an error message."""
    known: dict[type, str | None] = {}
    for path, module in model.named_modules():
        cls, name = type(module), path or "model"
        who = _maker(module.__dict__.get("forward"))
        if who is not None:
            yield path, who, f"{name} was patched by {who}; build the model again and patch it with one of the two only"
            continue
        if cls in known:
            continue
        known[cls] = None
        if (who := _maker(cls)) is not None:
            yield path, who, f"{name} is a {cls.__name__} of {who}; build the model without {who} first"
            continue
        forward = cls.forward
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        called = [forward, *(getattr(forward, "__globals__", {}).get(n) for n in names)]
        if who := next((found for found in map(_maker, called) if found is not None), None):
            about = f"{who} patched {cls.__name__} for all models of this process; start one without {who} first"
            yield path, who, f"{name}: {about}"
