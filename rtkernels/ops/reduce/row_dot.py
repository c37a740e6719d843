"""Dot products of the rows of two tensors, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.runtime import layout
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import FLOAT_DTYPES, check_dimensions, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, TYPES, block_of, group_threads, nothing, vector_bytes
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 512  # of a row, at most
_FWD = Kernel(
    "reduce/row_dot.cu", "row_dot_fwd", template="T", max_registers=72,
    args="x:ptr y:ptr out:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 threads_per_row:i64 aligned16:i64 "
    "evict_first:i64",
    variants=TYPES,
)  # fmt: skip
_BWD = Kernel(
    "reduce/row_dot.cu", "row_dot_bwd", template="T", max_registers=64,
    args="g:ptr x:ptr y:ptr dx:ptr dy:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 threads_per_row:i64 "
    "slices_per_row:i64 aligned16:i64",
    variants=TYPES,
)  # fmt: skip

# ---- plans ----------------------------------------------------------------------------------------------------------


def _check(x: Meta) -> None:
    check_dimensions("x", x.shape)


def _rows(x: Meta, y: Meta) -> tuple[int, int, int, int, bool]:
    """Return rows, columns, both row strides, and whether all rows can be accessed 16 bytes at a time."""
    rows, cols, vector = x.rows, x.shape[-1], 16 // x.dtype.itemsize
    strides = [meta.row_stride for meta in (x, y)]
    starts = [meta.misaligned // x.dtype.itemsize for meta in (x, y)]
    return rows, cols, *strides, vector_bytes(cols, *strides, *starts, limit=vector) == vector


def _plan_fwd(x: Meta, y: Meta, device: int) -> Steps:
    rows, cols, x_stride, y_stride, aligned = _rows(x, y)
    vector = 16 // x.dtype.itemsize
    accesses = (1 if cols <= _THREADS * vector else 2) if aligned else 0
    threads = group_threads(-(-cols // (accesses * vector if aligned else 8)), _THREADS)
    block = block_of(threads)
    grid = -(-rows // (block // threads))
    if cols >= 2**31 or grid > GRID_LIMIT:
        raise ArgumentError(f"x has {rows} rows of {cols} elements; expected fewer than 2^31 of either")
    evict_first = layout.reads_evict_first(2 * rows * cols * x.dtype.itemsize)
    launch = _FWD.bind((x.token,), device, grid, block)
    return Steps(Step(launch, "x", "y", "out", rows, cols, x_stride, y_stride, threads, accesses, evict_first))


def _plan_bwd(x: Meta, y: Meta, device: int) -> Steps:
    rows, cols, x_stride, y_stride, aligned = _rows(x, y)
    cut = layout.row_slices(rows, cols, 64 // x.dtype.itemsize if aligned else 8)
    launch = _BWD.bind((x.token,), device, cut.grid, cut.block)
    sizes = rows, cols, x_stride, y_stride, *cut[:2], aligned
    return Steps(Step(launch, "g", "x", "y", "dx", "dy", *sizes))


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() * y.float()).sum(-1).to(x.dtype)


def _reference_bwd(g: Tensor, x: Tensor, y: Tensor, need_x: bool, need_y: bool) -> tuple[Tensor, Tensor]:
    factor = g.float()[..., None]
    dx, dy = ((factor * other.float()).to(x.dtype).contiguous() for other in (y, x))
    return dx if need_x else nothing(x), dy if need_y else nothing(x)


# ---- operators ------------------------------------------------------------------------------------------------------

FORWARD = Operator(
    "row_dot_fwd", (Rows("x"), Rows("y", like="x")), results="out", plan=_plan_fwd, reference=_reference_fwd,
    outputs=lambda x: (Memory(x.shape[:-1], x.dtype),), check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "row_dot_bwd",
    (Dense("g", like="x", shape=lambda given: given["x"].shape[:-1], of="the result"), Rows("x"), Rows("y", like="x")),
    options="bool need_x, bool need_y", results="dx dy",
    outputs=lambda x, need_x, need_y: tuple(Memory.like(x) if need else None for need in (need_x, need_y)),
    plan=_plan_bwd, reference=_reference_bwd,
)  # fmt: skip


class _RowDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return FORWARD.call(x, y)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if g is None:
            return None, None
        need_x, need_y = ctx.needs_input_grad
        dx, dy = BACKWARD.call(g, *ctx.saved_tensors, need_x, need_y)
        return dx if need_x else None, dy if need_y else None


_differentiable = applied(_RowDot)


@public(tensors="y")
def row_dot(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the sums of ``x * y`` over the last dimension.

    Products and sums are in fp32, in a fixed order, and rounded once. Differentiable once.

    Args:
        x: At least one dimension; bfloat16, float16 or float32. Any strides (copied unless rows are unit-stride and
            evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        y: A tensor of x's shape, in x's dtype or float8_e4m3fn (which is converted first and has no gradient).
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor of x's shape without the last dimension, in x's dtype.
    """
    if y.dtype != x.dtype and x.dtype in FLOAT_DTYPES:
        token("y", y.dtype, (x.dtype, torch.float8_e4m3fn))
        y = y.to(x.dtype)  # exact
    if is_grad_enabled() and needs_grad(x, y):
        return _differentiable(x, y)
    return FORWARD.call(x, y)


OP = Op("row_dot", public=("row_dot",), kernels=(_FWD, _BWD), torch_ops=(FORWARD, BACKWARD))
