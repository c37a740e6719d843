"""Dot products of the rows of two tensors, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    address,
    block_of,
    check_same,
    group_threads,
    metadata,
    nothing,
    passing,
    row_count,
    row_stride,
    rowed,
    runs,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

_TOKENS = ("bf16", "fp16", "fp32")
_THREADS = 512  # of a row, at most
_FWD = Kernel(
    "reduce/row_dot.cu",
    "row_dot_fwd",
    template="T",
    args="x:ptr y:ptr out:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 threads_per_row:i64 wide:i64 passing:i64",
    variants=[(t,) for t in _TOKENS],
    max_registers=72,
)
_BWD = Kernel(
    "reduce/row_dot.cu",
    "row_dot_bwd",
    template="T",
    args="g:ptr x:ptr y:ptr dx:ptr dy:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 threads_per_row:i64 "
    "runs_per_row:i64 wide:i64",
    variants=[(t,) for t in _TOKENS],
    max_registers=64,
)

# ---- launchers ------------------------------------------------------------------------------------------------------


def _check(x: tuple[Any, ...], y: tuple[Any, ...], fp8: bool) -> str:
    t = token("x", x[0])
    if not x[1]:
        raise ArgumentError("x has no dimensions; expected at least one")
    check_same("y", y[1], x[1], "shape")
    check_same("y", y[3], x[3], "device index")
    token("y", y[0], (x[0], torch.float8_e4m3fn) if fp8 else (x[0],))
    return t


def _plan(x, y, align: int, backward: bool):
    t = _check(x, y, False)
    shape = x[1]
    if 0 in shape:
        return None, ()
    steps = [row_stride(shape, m[2]) for m in (x, y)]
    rows, cols, n = row_count(shape), shape[-1], 16 // x[0].itemsize
    wide = vector_bytes(align, cols, *steps, most=n) == n
    if backward:
        cut = runs(rows, cols, 4 * n if wide else 8)
        return _BWD.bind((t,), x[3], cut.grid, cut.block), (rows, cols, *steps, *cut[:2], wide)
    accesses = (1 if cols <= _THREADS * n else 2) if wide else 0
    threads = group_threads(-(-cols // (accesses * n if wide else 8)), _THREADS)
    block = block_of(threads)
    grid = -(-rows // (block // threads))
    if cols >= 2**31 or grid > GRID_LIMIT:
        raise ArgumentError(f"x has {rows} rows of {cols} elements; expected fewer than 2^31 of either")
    how = threads, accesses, passing(2 * rows * cols * x[0].itemsize)
    return _FWD.bind((t,), x[3], grid, block), (rows, cols, *steps, *how)


_PLANS = Plans(_plan)


def _align(x: Tensor, y: Tensor) -> int:
    """Return the alignment of both in elements."""
    return (x.data_ptr() // x.itemsize | y.data_ptr() // y.itemsize) % 16


def _launch_fwd(x: Tensor, y: Tensor) -> Tensor:
    if y.dtype != x.dtype:
        _check(metadata(x), metadata(y), True)
        y = y.to(x.dtype)  # exact
    if x.dim() and x.shape == y.shape:
        x, y = rowed(x), rowed(y)
    launch, args = _PLANS[metadata(x), metadata(y), _align(x, y), False]
    if launch is None:
        return torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    launch(x.data_ptr(), y.data_ptr(), out.data_ptr(), *args)
    return out


def _launch_bwd(g: Tensor, x: Tensor, y: Tensor, need_x: bool, need_y: bool) -> tuple[Tensor, Tensor]:
    check_same("g", g.shape, x.shape[:-1], "shape", of="the result")
    check_same("g", g.dtype, x.dtype, "dtype")
    g, x, y = g.contiguous(), rowed(x), rowed(y)
    launch, args = _PLANS[metadata(x), metadata(y), _align(x, y), True]
    results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None for need in (need_x, need_y)]
    if launch is not None:
        launch(g.data_ptr(), x.data_ptr(), y.data_ptr(), *map(address, results), *args)
    return tuple(nothing(x) if result is None else result for result in results)


def _reference_fwd(x: Tensor, y: Tensor) -> Tensor:
    _check(metadata(x), metadata(y), True)
    return (x.float() * y.float()).sum(-1).to(x.dtype)


def _reference_bwd(g: Tensor, x: Tensor, y: Tensor, need_x: bool, need_y: bool) -> tuple[Tensor, Tensor]:
    _check(metadata(x), metadata(y), False)
    factor = g.float()[..., None]
    dx, dy = ((factor * other.float()).to(x.dtype).contiguous() for other in (y, x))
    return dx if need_x else nothing(x), dy if need_y else nothing(x)


def _fake_fwd(x, y):
    return x.new_empty(x.shape[:-1])


def _fake_bwd(g, x, y, need_x, need_y):
    return tuple(x.new_empty(x.shape) if need else nothing(x) for need in (need_x, need_y))


FORWARD = TorchOp(
    "row_dot_fwd(Tensor x, Tensor y) -> Tensor", launch=_launch_fwd, reference=_reference_fwd, fake=_fake_fwd
)
BACKWARD = TorchOp(
    "row_dot_bwd(Tensor g, Tensor x, Tensor y, bool need_x, bool need_y) -> (Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class _RowDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return FORWARD(x, y)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        x, y = ctx.saved_tensors
        need_x, need_y = ctx.needs_input_grad
        dx, dy = BACKWARD(g, x, y.to(x.dtype), need_x, need_y)
        return dx if need_x else None, dy if need_y else None


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of ``x * y`` over the last dimension.

    Products and sums in fp32, in a fixed order; rounded once. Differentiable once.

    Args:
        x: At least one dimension; bfloat16, float16 or float32. Any strides (a copy is made unless rows are unit-stride
            and evenly spaced). May be any object with ``__dlpack__``; the result is then of its kind.
        y: Of x's shape, and of its dtype or float8_e4m3fn (converted first, and without a gradient).

    Returns:
        Dense, x's shape without the last dimension, of x's dtype.
    """
    if not isinstance(x, Tensor):
        return interop.call(row_dot, x, y)
    if is_grad_enabled() and needs_grad(x, y):
        return _RowDot.apply(x, y)
    return FORWARD(x, y)


OP = Op(
    "row_dot",
    public=("row_dot",),
    kernels=(_FWD, _BWD),
    torch_ops=(FORWARD, BACKWARD),
)
