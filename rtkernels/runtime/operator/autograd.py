"""Gradients: which calls want one, which tensors must not have one, and backwards without a derivative of their own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import may_overlap
from rtkernels.runtime.torch_private import forward_ad, is_dynamo_compiling, is_legacy_batched

try:
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
except ImportError:  # pragma: no cover

    def top_saved_tensors_hooks(ignore_is_tracing: bool) -> Any:
        return None


class _Dispatching(TorchDispatchMode):
    """Changes nothing, but while it is on every operator is called by the dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def needs_grad(a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> bool:
    """Return True if autograd wants a node for a call with these tensors. Callers ask ``is_grad_enabled`` first."""
    try:
        return a.requires_grad or (b is not None and b.requires_grad) or (c is not None and c.requires_grad)
    except AttributeError:
        raise _not_tensors(a, b, c) from None


def refuse_gradients(op: str, tensors: Iterable[Tensor]) -> None:
    """Raise if one of the tensors of an in-place function that is not differentiable requires a gradient."""
    try:
        refused = torch.is_grad_enabled() and [t for t in tensors if t.requires_grad]
    except AttributeError:  # not all are tensors, as the operator will say
        return
    if refused:
        raise ArgumentError(f"{op} is not differentiable, and a tensor requires grad; call it under torch.no_grad()")


def refuse_leaf(name: str, x: Tensor | None) -> None:
    """Raise if a tensor to be overwritten is a leaf that requires grad. Torch says so after it was overwritten."""
    if x is not None and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} is a leaf that requires grad; expected the result of an operation for in_place, or torch.no_grad()"
        )


def may_overwrite(reuse: str | None, inputs: dict[str, Tensor | None], others: Iterable[Tensor | None] = ()) -> bool:
    """Return True if a backward pass is to write gradients over the tensors that it has saved.

    False where that is not asked for; where nobody would notice that another node needs them (torch counts no versions
    of what passes through hooks for saved tensors, as in checkpointing); in compiled graphs, which plan their memory
    themselves; and where one of them needs no gradient and so may be anybody's.

    Args:
        reuse: What the user said.
        inputs: The inputs of the call that would be overwritten, by name.
        others: Its other inputs.

    Raises:
        ArgumentError: An input cannot be overwritten.
    """
    if reuse is None:
        return False
    if reuse != "inputs":
        raise ArgumentError(f"reuse is {reuse!r}; expected 'inputs' or None")
    given = {name: t for name, t in inputs.items() if t is not None}
    if is_dynamo_compiling() or top_saved_tensors_hooks(False) is not None:
        return False
    if not torch.is_grad_enabled() or not all(t.requires_grad for t in given.values()):
        return False
    rest = [t for t in others if t is not None]
    for name, t in given.items():
        base = t._base if t._is_view() else t
        if t.is_leaf or (base.is_leaf and base.requires_grad):
            what = "a leaf" if t.is_leaf else "a view of a leaf"
            raise ArgumentError(
                f"{name} is {what} that requires grad; expected the result of an operation for reuse='inputs', which "
                f"writes the gradient over {name}"
            )
        if not t.is_contiguous():
            raise ArgumentError(f"{name} has strides {t.stride()}; expected a dense tensor for reuse='inputs'")
        if any(may_overlap(t, other) for other in rest):
            raise ArgumentError(f"{name} shares memory with another input; expected its own for reuse='inputs'")
        rest.append(t)
    return True


def check_overwrite(ctx: Any, op: str, grads: Iterable[Tensor | None]) -> None:
    """Raise in a backward pass that is to overwrite saved tensors if that was done before, or is asked for a batch."""
    if _batched(grads):
        raise RuntimeError(f"{op}(reuse='inputs') does not go with is_grads_batched: call it without reuse")
    if getattr(ctx, "overwritten", False):
        raise RuntimeError(
            f"{op}(reuse='inputs') was differentiated before (retain_graph=True), and gradients were written over what "
            f"it had saved: call it without reuse"
        )
    ctx.overwritten = True


def detached(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors that require no gradient: the arguments of functions that have none."""
    try:
        return [t.detach() if t is not None and t.requires_grad else t for t in tensors]
    except AttributeError:
        raise _not_tensors(*tensors) from None


def _not_tensors(*values: Any) -> ArgumentError:
    """Return an error that names arguments as the caller of ``needs_grad`` or ``detached`` does."""
    names: dict[int, list[str]] = {}  # of an option, too: tensors come first, and its value may be the same object
    for name, value in sys._getframe(2).f_locals.items():
        names.setdefault(id(value), []).append(name)
    got = []
    for value in values:
        if not isinstance(value, Tensor | None):
            name, *others = names.get(id(value), ["an argument"])
            names[id(value)] = others or [name]
            got.append(f"{name} is a {type(value).__name__}")
    return ArgumentError(f"{', '.join(got)} beside a torch.Tensor; expected all array arguments to be tensors")


def refuse_tangents(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise if forward-mode differentiation is under way through one of these: its derivative would be lost."""
    for t in tensors:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise ArgumentError(
                f"{op} got a tensor with a tangent (forward-mode AD, torch.func.jvp) and has no derivative for it; use "
                f"backward, or give the primal (torch.autograd.forward_ad.unpack_dual) if the tangent may be dropped"
            )


def _batched(grads: Iterable[Tensor | None]) -> bool:
    return any(grad is not None and is_legacy_batched(grad) for grad in grads)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the ``backward`` of an ``autograd.Function`` as one that has no derivative itself.

    Torch's decorator of this name hands out gradients that look constant where the incoming ones are, as after
    ``y.sum()``, and that lead nowhere: second derivatives are then short of a term, or 0, without a word. Here all
    gradients of a pass with ``create_graph=True`` raise if they are differentiated, also in inputs of the forward pass
    alone (``torch.autograd.functional.hessian``). A forward that made the gradient and saved nothing else says
    ``ctx.computed_gradient = True``: without a way back, such a pass raises at once. Batches of gradients
    (``is_grads_batched``) come as tensors without memory; the dispatcher then calls operators for one at a time.
    """

    def dispatched(ctx: Any, *grads: Tensor | None) -> Any:
        with _Dispatching():
            return backward(ctx, *grads)

    message = f"{backward.__qualname__} is differentiable once (once_differentiable): it has no derivative itself"

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if is_dynamo_compiling():
            with torch.no_grad():
                return backward(ctx, *grads)
        if not torch.is_grad_enabled():  # nearly always
            try:
                return backward(ctx, *grads)
            except RuntimeError:  # an address was asked for, so nothing was launched yet
                if not _batched(grads):
                    raise
            return dispatched(ctx, *grads)
        if getattr(ctx, "overwrites", False):
            raise RuntimeError(f"{backward.__qualname__}: reuse='inputs' does not go with create_graph=True")
        ways = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]  # back to the inputs
        if not ways and getattr(ctx, "computed_gradient", False):
            raise RuntimeError(message)
        with torch.no_grad():
            results = (dispatched if _batched(grads) else backward)(ctx, *grads)
        results = results if isinstance(results, tuple) else (results,)
        results = [r if r is None else r.detach().requires_grad_() for r in results]
        raising = torch._C._functions.DelayedError(message.encode(), len(results) + len(ways))
        return raising(*results, *ways)[: len(results)]

    return wrapper


def constant(value: float) -> float:
    """Return a number that Dynamo takes for a constant, with a guard on it.

    Under ``torch.compile(dynamic=True)`` floats are graph inputs, and Dynamo (torch 2.13) fails when two
    ``autograd.Function`` calls use the same one. A dictionary key has to be known.
    """
    return {value: value}[value]
