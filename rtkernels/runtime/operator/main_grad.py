"""Where gradients of weights go at level 3 of batch invariance: a float32 tensor that a parameter has as ``main_grad``.

A sum over the rows of a micro-batch starts from it, so that the order of additions is that of one batch. Parameters
without one get a gradient by autograd, which is that of one backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.invariance import BY_ITSELF, refuse, starts_from_result
from rtkernels.runtime.torch_private import is_dynamo_compiling

_USER = "_rtkernels_main_grad_user"


class Start:
    """The sum so far of a parameter's gradient. ``total``: float32, of the parameter's shape."""

    __slots__ = ("parameter", "total")

    def __init__(self, parameter: Tensor, total: Tensor) -> None:
        self.parameter, self.total = parameter, total

    def added(self) -> Tensor | None:
        """Return what autograd gets once the gradient is in ``total``: None, or zeros if the trainer reads a flag."""
        if not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        zero = torch.zeros((), dtype=self.parameter.dtype, device=self.parameter.device)
        return zero.expand(self.parameter.shape)


def _parameter(weight: Tensor) -> Tensor | None:
    """Return the parameter that a weight is, or of which autocast made it."""
    if weight.is_leaf:
        return weight
    node = weight.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def start_of(weight: Any, user: str) -> Start | None:
    """Return where to add the gradient of a weight at level 3, or None if autograd is to have it.

    Args:
        weight: A parameter, or its copy in another dtype.
        user: What adds to it. Two kinds of sums into one tensor would alternate with micro-batches, which is refused.
    """
    if not starts_from_result() or is_dynamo_compiling() or not isinstance(weight, Tensor) or not weight.requires_grad:
        return None
    parameter = _parameter(weight)
    total = None if parameter is None else getattr(parameter, "main_grad", None)
    if total is None:
        return None
    if total.dtype != torch.float32 or total.shape != parameter.shape or not total.is_contiguous():
        raise ArgumentError(
            f"main_grad is {str(total.dtype).removeprefix('torch.')} of shape {tuple(total.shape)} and strides "
            f"{total.stride()}; expected float32, contiguous, of shape {tuple(parameter.shape)}, that of its parameter"
        )
    before = getattr(parameter, _USER, user)
    if before != user:
        refuse(f"the main_grad of a weight of {before} and {user}", "their sums alternate with micro-batches")
    setattr(parameter, _USER, user)
    return Start(parameter, total)


# Nodes of views and copies: what lies behind one gets its gradient.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("ToCopy", "View", "ReshapeAlias", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "T", "Transpose",
                 "Permute", "Slice", "Select", "Clone", "Alias", "AsStrided")
)  # fmt: skip


def main_grad_of(node: Any) -> Tensor | None:
    """Return the ``main_grad`` of the parameter whose view or copy a node belongs to; None without one."""
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return None if getattr(variable, "grad_added_to_main_grad", False) else getattr(variable, "main_grad", None)


def added_or_raised(ctx: Any, name: str, results: Any) -> Any:
    """Return gradients at level 3 of batch invariance; raise if one of them would miss its parameter's main_grad."""
    if starts_from_result():
        given = results if isinstance(results, tuple) else (results,)
        wanted = [grad for grad, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
        nodes = [node for node, _ in ctx.next_functions if node is not None]
        for grad, node in zip(wanted, nodes, strict=True):
            if grad is not None and main_grad_of(node) is not None:
                refuse(f"{name}: its gradient of a parameter with a main_grad", BY_ITSELF)
    return results
