"""Rows of tokens to the experts that chose them and back: ``moe_permute``, ``moe_unpermute`` and their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe import moe_permute_plan as plans
from rtkernels.ops.moe import reference
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute_plan import KERNELS
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Operator, Rows
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op


def _permute_outputs(x, slots, scale, probs):
    count = slots.shape[0]
    return (
        Memory((count, x.shape[1]), x.dtype),
        None if scale is None else Memory((count, *scale.shape[1:]), torch.float32),
        None if probs is None else Memory((count,), probs.dtype),
    )


def _backward_outputs(dout, y, rows, slots, probs, need_y):
    dy = Memory((slots.shape[0], dout.shape[1]), dout.dtype) if need_y else None
    return dy, None if y is None else Memory(rows.shape, probs.dtype)


_ROWS, _SLOTS, _PROBS = Dense("rows", None), Dense("slots", None), Dense("probs", None, optional=True)
_EXPERTS = Dense("experts", None, optional=True)
PERMUTE = Operator(
    "moe_permute_fwd", (Rows("x", None), _ROWS, _SLOTS, Dense("scale", None, optional=True), _PROBS, _EXPERTS),
    results="y scale_out probs_out", outputs=_permute_outputs, plan=plans.plan_permute, reference=reference.permute,
    check=plans.check_permute, plans_empty=True,
)  # fmt: skip
UNPERMUTE = Operator(
    "moe_unpermute_fwd", (Rows("y", None), _ROWS, _PROBS, _EXPERTS, Dense("carried", None, optional=True)),
    results="out numbers", plan=plans.plan_unpermute, reference=reference.unpermute, check=plans.check_unpermute,
    outputs=lambda y, rows, carried: (
        Memory((rows.shape[0], y.shape[1]), y.dtype), None if carried is None else Memory(rows.shape, carried.dtype),
    ),
    plans_empty=True,
)  # fmt: skip
UNPERMUTE_BWD = Operator(
    "moe_unpermute_bwd",
    (Rows("dout", None), Rows("y", None, optional=True), _ROWS, _SLOTS, Dense("probs", None), _EXPERTS),
    options="bool need_y", results="dy dprobs", outputs=_backward_outputs, plan=plans.plan_backward,
    reference=reference.backward, check=plans.check_backward, plans_empty=True,
)  # fmt: skip
PROBS = Operator(
    "moe_probs", (Dense("values", None), Dense("rows", None, optional=True), _EXPERTS), options="int columns",
    results="out", plan=plans.plan_probs, reference=reference.probs_of, check=plans.check_numbers, plans_empty=True,
    outputs=lambda values, rows, columns: (
        Memory(((values if rows is None else rows).shape[0], columns), values.dtype),
    ),
)  # fmt: skip
_permute, _unpermute, _unpermute_backward, _probs = (o.call for o in (PERMUTE, UNPERMUTE, UNPERMUTE_BWD, PROBS))


# ---- gradients ------------------------------------------------------------------------------------------------------


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, scale, rows, slots, experts):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, experts)
        ctx.columns = 0 if probs is None else probs.shape[1]
        y, scale_out, probs_out = _permute(x, rows, slots, scale, probs, experts)
        fixed = ([y] if x.dtype in FP8_DTYPES else []) + ([probs_out] if probs is None else [])
        ctx.mark_non_differentiable(*fixed, scale_out)
        return y, probs_out, scale_out  # no None: torch.compile of older torch fails on it

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dprobs_out, _):
        rows, experts = ctx.saved_tensors
        want_x, want_probs = ctx.needs_input_grad[0] and dy is not None, ctx.needs_input_grad[1]
        want_probs = want_probs and dprobs_out is not None
        dx = dprobs = None
        if want_x:
            together = want_probs and experts is None
            dx, dprobs = _unpermute(dy, rows, None, None, dprobs_out if together else None)
        if want_probs and (not want_x or experts is not None):
            dprobs = _probs(dprobs_out, rows, experts, ctx.columns)
        return dx, dprobs if want_probs else None, None, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, probs, rows, slots, experts):
        want_probs = probs is not None and probs.requires_grad
        ctx.save_for_backward(y if want_probs else None, probs, rows, slots, experts)
        return _unpermute(y, rows, probs, experts, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        y, probs, rows, slots, experts = ctx.saved_tensors
        need_y, need_probs = ctx.needs_input_grad[:2]
        if probs is None:
            return _permute(dout, rows, slots, None, None, None)[0], None, None, None, None
        dy, dprobs = _unpermute_backward(dout, y if need_probs else None, rows, slots, probs, experts, need_y)
        if need_probs and experts is not None:
            dprobs = _probs(dprobs, None, experts, probs.shape[1])
        return dy if need_y else None, dprobs if need_probs else None, None, None, None


_differentiable_permute, _differentiable_unpermute = applied(_Permute), applied(_Unpermute)


class MoePermuted(NamedTuple):
    """Permuted rows and what was carried along; None for what was not given."""

    y: Tensor
    probs: Tensor | None
    scale: Tensor | None


def experts_if_dense(probs: Tensor | None, index: MoeIndex, dense_probs: bool | None) -> Tensor | None:
    """Return index.experts if probs has a column per expert, None if it has one per choice.

    Raises:
        ArgumentError: The shape says neither, or both and `dense_probs` is None.
    """
    if probs is None:
        return None
    choices, experts = index.rows.shape[-1], index.counts.shape[0]
    columns = probs.shape[-1] if probs.dim() == 2 else -1
    if dense_probs is None:
        if columns == choices == experts:
            raise ArgumentError(
                f"probs has {columns} columns, and there are as many choices as experts; expected dense_probs=False "
                "(a column per choice) or dense_probs=True (a column per expert) to say which"
            )
        dense_probs = columns == experts
    if columns != (experts if dense_probs else choices):
        raise ArgumentError(
            f"probs has shape {tuple(probs.shape)}; expected {(index.rows.shape[0], choices)}, one per choice, or "
            f"{(index.rows.shape[0], experts)}, one per expert"
        )
    return index.experts if dense_probs else None


def as_index(index: Any) -> MoeIndex:
    """Return the index as a MoeIndex.

    Raises:
        ArgumentError: It is not one.
    """
    if isinstance(index, MoeIndex):
        return index
    if isinstance(index, tuple) and len(index) == len(MoeIndex._fields):
        return MoeIndex(*index)
    raise ArgumentError(f"index is a {type(index).__name__}; expected a MoeIndex")


@public
def moe_permute(
    x: Tensor, index: MoeIndex, *, probs: Tensor | None = None, scale: Tensor | None = None,
    dense_probs: bool | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | MoePermuted:  # fmt: skip
    """Copy the rows of tokens to the rows of their experts: ``y[index.rows[t, j]] = x[t]``.

    One launch. Rows that no choice fills (padding, and the rows after the last expert) are zeros, and so are their
    probabilities and scales. The index is read on the device only: the call does not synchronise, and a graph can be
    replayed with another index of the same sizes. Entries of ``index.rows`` outside y are dropped choices.

    Differentiable in x and probs: ``dx[t]`` is the sum of dy over the rows of t, in fp32 and in the order of the
    choices, rounded once; ``dprobs`` is 0 for dropped choices. fp8 codes and scales have no gradient.

    Args:
        x: ``[T, H]``; bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. Any strides (copied unless rows are
            unit-stride). Any object with ``__dlpack__`` is accepted; the index must be, and results are, of the same
            kind.
        index: From ``moe_index``, for these T tokens. y has as many rows as ``index.slots`` has entries.
        probs: Probabilities to permute as well: ``[T, k]``, one per choice, or ``[T, experts]``, one per expert;
            float32, bfloat16 or float16.
        scale: float32 ``[T]`` or ``[T, s]``: scales of x's rows, to permute as well.
        dense_probs: Whether probs has a column per expert. Needed only if there are as many choices as experts.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        y ``[R, H]`` in x's dtype. With probs or scale a named tuple ``(y, probs, scale)``, where probs is ``[R]`` and
        scale ``[R]`` or ``[R, s]``; None if not given.
    """
    index = as_index(index)
    experts = experts_if_dense(probs, index, dense_probs)
    if is_grad_enabled() and needs_grad(x, probs):
        y, probs_out, scale_out = _differentiable_permute(x, probs, scale, index.rows, index.slots, experts)
    else:
        y, scale_out, probs_out = _permute(x, index.rows, index.slots, scale, probs, experts)
    if probs is None and scale is None:
        return y
    return MoePermuted(y, None if probs is None else probs_out, None if scale is None else scale_out)


@public
def moe_unpermute(
    y: Tensor, index: MoeIndex, *, probs: Tensor | None = None, dense_probs: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum the rows of each token: ``out[t] = sum over j of probs[t, j] * y[index.rows[t, j]]``.

    Sums are in fp32 in the order of the choices, and rounded once. Without probs the weights are 1. Entries of
    ``index.rows`` outside y are dropped choices and contribute nothing. The index is read on the device only.

    Differentiable in y and probs: ``dy[row] = probs[t, j] * dout[t]``, zeros in rows that no choice fills;
    ``dprobs[t, j]`` is the dot product of ``dout[t]`` and the row in fp32, 0 for dropped choices. (Without probs,
    ``moe_permute_fp8(dout, index)`` is the gradient of y as fp8 codes.)

    Args:
        y: ``[R, H]``, where R is the length of ``index.slots``; bfloat16, float16 or float32. Any strides (copied
            unless rows are unit-stride). Any object with ``__dlpack__`` is accepted; the index must be, and results
            are, of the same kind.
        index: As given to :func:`moe_permute`.
        probs: Weights: ``[T, k]``, one per choice, or ``[T, experts]``, one per expert; float32, bfloat16 or float16.
        dense_probs: Whether probs has a column per expert. Needed only if there are as many choices as experts.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor ``[T, H]`` in y's dtype.
    """
    index = as_index(index)
    experts = experts_if_dense(probs, index, dense_probs)
    if y.dim() == 2 and y.shape[0] != index.slots.shape[0]:
        raise ArgumentError(f"y has {y.shape[0]} rows; expected {index.slots.shape[0]}, as many as index.slots")
    if is_grad_enabled() and needs_grad(y, probs):
        return _differentiable_unpermute(y, probs, index.rows, index.slots, experts)
    return _unpermute(y, index.rows, probs, experts, None)[0]


OP = Op(
    "moe_permute", public=("moe_permute", "moe_unpermute"), kernels=KERNELS,
    torch_ops=(PERMUTE, UNPERMUTE, UNPERMUTE_BWD, PROBS),
)  # fmt: skip
