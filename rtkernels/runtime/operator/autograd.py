"""Gradients: which calls need one, which tensors must not have one, and backward passes without a derivative."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime import invariance
from rtkernels.runtime.layout import may_overlap
from rtkernels.runtime.operator.main_grad import added_or_raised
from rtkernels.runtime.torch_private import (
    Batch,
    any_autocast,
    forward_ad,
    functorch_transform,
    is_batched,
    is_dynamo_compiling,
    no_autocast,
    top_saved_tensors_hooks,
    without_autocast,
)


def needs_grad(a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> bool:
    """Return True if autograd needs a node for a call with these tensors. Callers check ``is_grad_enabled`` first."""
    try:
        return a.requires_grad or (b is not None and b.requires_grad) or (c is not None and c.requires_grad)
    except AttributeError:
        raise _not_tensors(a, b, c) from None


def refuse_gradients(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise if a tensor requires a gradient, for in-place functions that are not differentiable."""
    try:
        refused = torch.is_grad_enabled() and [t for t in tensors if t is not None and t.requires_grad]
    except AttributeError:  # not all are tensors; the operator reports it
        return
    if refused:
        raise ArgumentError(f"{op} is not differentiable, and a tensor requires grad; call it under torch.no_grad()")


def refuse_outputs(**outputs: Tensor | None) -> None:
    """Raise an ArgumentError that names a given output, for calls that need gradients."""
    for name, t in outputs.items():
        if t is not None:
            raise ArgumentError(
                f"{name} is given but a tensor needs gradients; expected torch.no_grad() around the call, detached "
                f"tensors, or no {name}"
            )


def written_by_copy(in_place: bool) -> bool:
    """Return True if a differentiable call in place has to compute a new tensor and copy it to the old one.

    Dynamo traces ``mark_dirty`` of an input of the graph without an error, and the gradient of that input is then the
    incoming one, as if nothing had been computed.
    """
    return in_place and is_dynamo_compiling()


def refuse_leaf(name: str, x: Tensor | None) -> None:
    """Raise if a tensor that will be overwritten is a leaf that requires grad. Torch raises only afterwards."""
    if x is not None and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} is a leaf that requires grad; expected the result of an operation for in_place, or torch.no_grad()"
        )


def may_overwrite(reuse: str | None, inputs: dict[str, Tensor | None], others: Iterable[Tensor | None] = ()) -> bool:
    """Return True if a backward pass may write gradients over its saved tensors.

    False if the user does not request it; if saved-tensor hooks are active, as in checkpointing (torch does not count
    versions of such tensors, so the overwriting of one that another node needs would go unnoticed); in compiled graphs,
    which plan their own memory; and if an input requires no gradient, because others may use it.

    Args:
        reuse: The argument of the public function.
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
    """Raise if a backward pass would overwrite saved tensors a second time, or for a batch of gradients."""
    if _batched(grads):
        raise RuntimeError(f"{op}(reuse='inputs') does not go with is_grads_batched: call it without reuse")
    if getattr(ctx, "overwritten", False):
        raise RuntimeError(
            f"{op}(reuse='inputs') was differentiated before (retain_graph=True), and gradients were written over what "
            f"it had saved: call it without reuse"
        )
    ctx.overwritten = True


def detached(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors, detached where they require a gradient: arguments of functions without a gradient."""
    try:
        return [t.detach() if t is not None and t.requires_grad else t for t in tensors]
    except AttributeError:
        raise _not_tensors(*tensors) from None


def _not_tensors(*values: Any) -> ArgumentError:
    """Return an error that names arguments by the variables of the caller of ``needs_grad`` or ``detached``."""
    names: dict[int, list[str]] = {}  # several for one object: tensors come before options
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
    """Raise if one of these has a tangent of forward-mode differentiation, because the tangent would be lost."""
    for t in tensors:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise ArgumentError(
                f"{op} got a tensor with a tangent (forward-mode AD, torch.func.jvp) and has no derivative for it; use "
                f"backward, or give the primal (torch.autograd.forward_ad.unpack_dual) if the tangent may be dropped"
            )


def _batched(grads: Iterable[Tensor | None]) -> bool:
    return any(grad is not None and is_batched(grad) for grad in grads)


def _one_by_one(run: Callable[..., Any], ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
    """Run a backward for each gradient of a batch, and return the results as a batch again.

    A batch is a tensor without memory, and operators that write to an argument have no rule for one.
    """
    batch = Batch(next(grad for grad in grads if grad is not None and is_batched(grad)))
    if not batch:
        raise RuntimeError("the gradients are a batch of batches; expected one level of vmap or is_grads_batched")
    parts = [grad if grad is None or not is_batched(grad) else batch.removed(grad) for grad in grads]
    count = next(len(part) for part, grad in zip(parts, grads, strict=True) if part is not grad)
    each = []
    for i in range(count):
        results = run(ctx, *(part if part is grad else part[i] for part, grad in zip(parts, grads, strict=True)))
        each.append(results if isinstance(results, tuple) else (results,))
        if any(r is not None and vars(r) for r in each[-1]):
            raise RuntimeError("a gradient that carries codes does not go with is_grads_batched")
    return tuple(None if r[0] is None else batch.added(torch.stack(r)) for r in zip(*each, strict=True))


def differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the ``backward`` of an ``autograd.Function`` that calls differentiable functions.

    It is called for one gradient at a time, as in ``once_differentiable``.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if not is_dynamo_compiling() and _batched(grads):
            return _one_by_one(backward, ctx, grads)
        return backward(ctx, *grads)

    return wrapper


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the ``backward`` of an ``autograd.Function`` as not differentiable.

    Torch's decorator of this name returns gradients that look constant if the incoming ones are, as after ``y.sum()``:
    second derivatives then silently lack a term, or are 0. Here all gradients of a pass with ``create_graph=True``
    raise if they are differentiated, even with respect to inputs of the forward pass alone
    (``torch.autograd.functional.hessian``). A forward that computed the gradient and saved nothing else sets
    ``ctx.computed_gradient = True``; if no tensor then leads back to the inputs, such a pass raises at once. Batches
    of gradients (``is_grads_batched``) are tensors without memory, so the backward is run for one gradient at a time.
    Autocast is off in it: it would round products in plain torch.
    """

    name = backward.__qualname__

    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        return added_or_raised(ctx, name, backward(ctx, *grads))

    message = f"{name} is differentiable once (once_differentiable): it has no derivative itself"

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if is_dynamo_compiling():
            with torch.no_grad(), without_autocast("cuda"), without_autocast("cpu"):
                return backward(ctx, *grads)
        if any_autocast():
            with no_autocast():
                return wrapper(ctx, *grads)
        run = backward if invariance.state.highest < 3 else checked
        if not torch.is_grad_enabled():  # nearly always
            try:
                return run(ctx, *grads)
            except RuntimeError:  # raised by data_ptr, before any launch
                if not _batched(grads) or getattr(ctx, "overwrites", False):
                    raise
            return _one_by_one(run, ctx, grads)
        if getattr(ctx, "overwrites", False):
            raise RuntimeError(f"{backward.__qualname__}: reuse='inputs' does not go with create_graph=True")
        ways = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]  # back to the inputs
        if not ways and getattr(ctx, "computed_gradient", False):
            raise RuntimeError(message)
        with torch.no_grad():
            results = _one_by_one(run, ctx, grads) if _batched(grads) else run(ctx, *grads)
        results = results if isinstance(results, tuple) else (results,)
        results = [r if r is None else r.detach().requires_grad_() for r in results]
        raising = torch._C._functions.DelayedError(message.encode(), len(results) + len(ways))
        return raising(*results, *ways)[: len(results)]

    return wrapper


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without its wrapper, which looks for leaked functorch tensors."""
    plain = super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        if is_dynamo_compiling() or functorch_transform() is not None:
            return function.apply(*args)
        return plain(*args)

    return apply


def constant(value: float) -> float:
    """Return a number that Dynamo treats as a constant, with a guard on it.

    Under ``torch.compile(dynamic=True)`` floats are graph inputs, and Dynamo (torch 2.13) fails if two
    ``autograd.Function`` calls use the same one. A dictionary key must be a constant.
    """
    return {value: value}[value]
