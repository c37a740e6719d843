"""Find the forward that TRL gives to a model for its fused head, also behind the wrappers of accelerate.

TRL's trainers call ``model(..., fused_lm_head=True)``, which the model's own forward does not know: they set a function
on the instance. Accelerate may wrap it for mixed precision: functions that keep the inner one in their closure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

FUSED = "fused_lm_head"  # the argument that asks for log-probabilities
ORIGINAL = "_rtkernels_trl_forward"  # on our forward: the one of TRL that it replaces
TOLD = "_rtkernels_told_of_trl"
_MODULE, _NAME = "trl.trainer.utils", "_fused_forward"
_DEPTH = 8


def is_trl(function: Any) -> bool:
    """Return True for the forward that TRL's ``add_fused_lm_head`` sets."""
    if not isinstance(function, FunctionType):
        return False
    return function.__code__.co_name == _NAME and function.__globals__.get("__name__") == _MODULE


def is_ours(function: Any) -> bool:
    """Return True for the forward that ``use_fused_head`` sets."""
    return isinstance(function, FunctionType) and ORIGINAL in function.__dict__


def find(model: nn.Module, wanted: Callable[[Any], bool]) -> tuple[FunctionType, Callable[[FunctionType], None]] | None:
    """Return the function among the forwards of an instance, and what puts another one in its place."""

    def on_instance(function: FunctionType) -> None:
        model.__dict__["forward"] = MethodType(function, model)

    def search(value: Any, put: Callable[[FunctionType], None], depth: int) -> Any:
        if isinstance(value, MethodType):
            value = value.__func__
        if wanted(value):
            return value, put
        if depth == _DEPTH or is_trl(value) or is_ours(value):  # what TRL calls without fused_lm_head is not searched
            return None
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                inner = cell.cell_contents
                if callable(inner) and not isinstance(inner, (type, nn.Module)):
                    if (found := search(inner, _into_cell(cell, value), depth + 1)) is not None:
                        return found
        elif callable(inner := getattr(value, "model_forward", None)):  # accelerate's conversion of outputs to fp32
            return search(inner, _into_object(value), depth + 1)
        return None

    return search(model.__dict__.get("forward"), on_instance, 0)


def _into_cell(cell: Any, function: FunctionType) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if getattr(function, "__wrapped__", None) is cell.cell_contents:
            function.__wrapped__ = value
        cell.cell_contents = value

    return put


def _into_object(wrapper: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        wrapper.model_forward = value

    return put


def tell(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Warn once if a patched model is asked for TRL's fused head and computes it with TRL's function."""
    if not kwargs.get(FUSED) or TOLD in model.__dict__:
        return
    model.__dict__[TOLD] = True
    if find(model, is_ours) is None:
        warnings.warn(
            "rtkernels.models.patch: the model is called with fused_lm_head=True, so the loss comes from TRL's head "
            "and not from ours: call rtkernels.models.use_fused_head(trainer) once the trainer is built",
            stacklevel=2,
        )
