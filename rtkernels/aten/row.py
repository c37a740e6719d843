"""Operators of whole rows: softmax and log_softmax over the last dimension, and their gradients (family ``row``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.table import NotHandled, Overload
from rtkernels.ops.reduce.softmax import BACKWARD as SOFTMAX_BWD
from rtkernels.ops.reduce.softmax_plan import plan_as_torch
from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import FLOATS
from rtkernels.runtime.operator.declared import Rows

_DTYPE, _EMPTY, _RANK, _DIM, _OPTION = (
    NotHandled(reason) for reason in ("dtype", "empty", "no dimensions", "not the last dimension", "option")
)
_SOFTMAX = Primitive(
    "softmax_as_torch", (Rows("x"),), "scale, log", numbers="scale", results="y",
    outputs=lambda x, *_: (Memory(x.shape, x.dtype),), plan=plan_as_torch,
)  # fmt: skip


def _refused(x: Tensor, dim: int) -> NotHandled | None:
    if x.dtype not in FLOATS:
        return _DTYPE
    if x.numel() == 0:
        return _EMPTY
    if x.dim() == 0:
        return _RANK
    return None if dim in (-1, x.dim() - 1) else _DIM


def _softmax(log: bool) -> Callable[..., Any]:
    def handler(x: Tensor, dim: int, half_to_float: bool) -> Any:
        return _OPTION if half_to_float else _refused(x, dim) or _SOFTMAX(x, 1.0, log)

    return handler


def _softmax_backward(log: bool) -> Callable[..., Any]:
    def handler(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if input_dtype != output.dtype or grad_output.dtype != output.dtype:
            return _OPTION
        refused = _refused(output, dim)
        return SOFTMAX_BWD.call(grad_output, output, None, 1.0, log) if refused is None else refused

    return handler


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    for name, log in (("softmax", False), ("log_softmax", True)):
        yield Overload(f"_{name}", "row", _softmax(log), default=True, opinfo=(name,))
        yield Overload(f"_{name}_backward_data", "row", _softmax_backward(log), default=True, opinfo=(name,))
