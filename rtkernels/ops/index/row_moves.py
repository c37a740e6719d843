"""Whole rows moved: selected by index, added to the rows an index names, in chunks put into another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.index import id_bounds
from rtkernels.ops.index.row_moves_operators import CHUNKS, SCATTER, SCATTER_INTO, SELECT, SELECT_INTO
from rtkernels.ops.index.row_moves_plan import KERNELS
from rtkernels.runtime.call.out import with_out
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_tensor
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op

# ---- gradients ------------------------------------------------------------------------------------------------------


class _IndexSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        ctx.rows = x.shape[0]
        y, moved = SELECT.call(x, indices, scale)
        ctx.mark_non_differentiable(moved)
        return y, moved

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        (indices,) = ctx.saved_tensors
        return None if dy is None else SCATTER.call(dy, indices, ctx.rows, None), None, None


class _ScatterAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices, rows, weights):
        ctx.set_materialize_grads(False)
        wanted = weights is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(indices, weights, x if wanted else None)
        return SCATTER.call(x, indices, rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None
        indices, weights, x = ctx.saved_tensors
        dx, _ = SELECT.call(dy, indices, None)
        dw = None if x is None else (dx.float() * x.float()).sum(-1).to(weights.dtype)
        if weights is not None:
            dx = (dx.float() * weights.float()[:, None]).to(dx.dtype)
        return dx if ctx.needs_input_grad[0] else None, None, None, dw


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, order, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(counts, order)
        y, moved = CHUNKS.call(x, counts, order, scale, False)
        ctx.mark_non_differentiable(moved)
        return y, moved

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        counts, order = ctx.saved_tensors
        return None if dy is None else CHUNKS.call(dy, counts, order, None, True)[0], None, None, None


_select, _scatter_add, _sort_chunks = map(applied, (_IndexSelect, _ScatterAdd, _SortChunks))

# ---- public ---------------------------------------------------------------------------------------------------------


def _check_out(out: Any, gradient: bool) -> None:
    check_tensor("out", out)
    if gradient or (is_grad_enabled() and out.requires_grad):
        raise ArgumentError("out is given and a tensor requires grad; expected neither, or to run under no_grad")


@public(own_out=True)
def index_select(
    x: Tensor, indices: Tensor, *, scale: Tensor | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the rows ``x[indices]``, optionally with their scales.

    An index that is not a row of x, such as -1, gives a row of zeros with scale 0. Bytes are copied unchanged.
    Differentiable once in x; the gradient is a deterministic :func:`scatter_add`.

    Args:
        x: ``[rows, columns]`` of any dtype of 1, 2, 4 or 8 bytes (copied unless rows are unit-stride). Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        indices: ``[n]``, int32 or int64.
        scale: ``[rows]`` or ``[rows, any]``, float32: selected the same way.
        out: ``[n, columns]`` in x's dtype with unit-stride rows, to write the result to. Not if x requires grad. x is
            copied if they share memory. With `scale`, also a tuple of contiguous tensors for both results (None:
            allocated).

    Returns:
        ``[n, columns]`` in x's dtype, contiguous unless it is `out`; with `scale` a tuple of it and ``[n]`` or
        ``[n, any]``.
    """
    if isinstance(out, (tuple, list)):
        return with_out(index_select, {"x": x, "indices": indices, "scale": scale, "out": out}, ())
    gradient = is_grad_enabled() and needs_grad(x)
    if out is not None:
        _check_out(out, gradient)
        moved = SELECT_INTO(out, x, indices, scale)
        return out if scale is None else (out, moved)
    y, moved = _select(x, indices, scale) if gradient else SELECT.call(x, indices, scale)
    return y if scale is None else (y, moved)


@public(own_out=True)
def scatter_add(
    x: Tensor, indices: Tensor, rows: int | None = None, *, weights: Tensor | None = None, out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """Add every row of x to the row of the result that its index names: ``out[indices[r]] += weights[r] * x[r]``.

    Deterministic: rows that share an index are summed in fp32 in a fixed order (ascending; many rows in parts that are
    summed in order) and rounded once, without atomics. Indices that are not a row of the result, such as -1, are
    skipped. Differentiable once in x and weights, unless `out` is given.

    Args:
        x: ``[n, columns]``, bfloat16, float16 or float32; copied unless rows are unit-stride. Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        indices: ``[n]``, int32 or int64.
        rows: Number of rows of the result. Optional if `out` is given.
        weights: ``[n]``, bfloat16, float16 or float32, multiplied in fp32.
        out: ``[rows, columns]``, bfloat16, float16 or float32 with unit-stride rows, to write the sums to. x is copied
            if they share memory.
        accumulate: Add to the values of `out`, in fp32 before the rounding. Otherwise they are overwritten.

    Returns:
        `out`, or a contiguous ``[rows, columns]`` in x's dtype.
    """
    gradient = is_grad_enabled() and needs_grad(x, weights)
    if out is None:
        if rows is None or accumulate:
            raise ArgumentError(f"out is None, rows {rows}, accumulate {accumulate}; expected rows, or out to write to")
        if gradient:
            return _scatter_add(x, indices, rows, weights)
        return SCATTER.call(x, indices, rows, weights)
    _check_out(out, gradient)
    if rows is not None and out.dim() and rows != out.shape[0]:
        raise ArgumentError(f"rows is {rows}; expected {out.shape[0]}, the rows of out, or None")
    SCATTER_INTO(out, x, indices, weights, accumulate)
    return out


@public
def sort_chunks(
    x: Tensor, counts: Tensor, order: Tensor, *, scale: Tensor | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Split the rows of x into chunks and reorder the chunks, as needed after an all-to-all between experts.

    Chunk c has ``counts[c]`` rows, and the result begins with chunk ``order[0]``. The host reads neither, so the call
    does not synchronise and can be captured in a CUDA graph. Differentiable once in x; the gradient is in the original
    order.

    Args:
        x: ``[rows, columns]`` of any dtype of 1, 2, 4 or 8 bytes (copied unless rows are unit-stride). Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        counts: Rows of each chunk, ``[n]`` int32 or int64, up to 65536 of them. Negative ones count as 0. Rows past the
            sum are in no chunk; counts beyond the rows of x are clamped.
        order: ``[n]`` int32 or int64, a permutation of the chunks. An entry that is not a chunk, or that repeats an
            earlier one, is skipped; chunks that are not named are not in the result.
        scale: ``[rows]`` or ``[rows, any]``, float32: reordered the same way.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A contiguous tensor like x; rows at its end that no chunk fills are 0. With `scale` a tuple of both.
    """
    if is_grad_enabled() and needs_grad(x):
        y, moved = _sort_chunks(x, counts, order, scale)
    else:
        y, moved = CHUNKS.call(x, counts, order, scale, False)
    return y if scale is None else (y, moved)


OP = Op(
    "row_moves", public=("index_select", "scatter_add", "sort_chunks", "id_bounds"),
    kernels=(*KERNELS, *id_bounds.KERNELS), uses=("embedding",),
    torch_ops=(SELECT, SELECT_INTO, SCATTER, SCATTER_INTO, CHUNKS, id_bounds.BOUNDS),
)  # fmt: skip
