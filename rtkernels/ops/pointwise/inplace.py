"""Adding to a tensor and scaling it, in its own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.constants import constant
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, may_overlap, row_count, row_slices, row_stride, vector_bytes
from rtkernels.runtime.operator.arguments import Within, check_number
from rtkernels.runtime.operator.autograd import applied, once_differentiable, refuse_leaf, written_by_copy
from rtkernels.runtime.operator.declared import Argument, InPlaceRows, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")]
_KERNEL = Kernel(
    "pointwise/inplace.cu", "add_in_place", template="T U", max_registers=80,
    args="x:ptr y:ptr factor:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 threads_per_row:i64 slices_per_row:i64 "
    "aligned16:i64 alpha:f64 beta:f64",
    variants=_PAIRS,
)  # fmt: skip

_THREADS = 128

# ---- plans ----------------------------------------------------------------------------------------------------------


def _check(x: Meta, y: Meta | None, factor: Meta | None) -> None:
    if y is not None:
        accepted = (torch.float32, torch.bfloat16, torch.float16) if x.dtype == torch.float32 else (x.dtype,)
        token("y", y.dtype, accepted)
        check_same("y", y.shape, x.shape, "shape")
    if factor is not None:
        token("factor", factor.dtype, (torch.float32,))
        if factor.numel() != 1:
            raise ArgumentError(f"factor has shape {tuple(factor.shape)}; expected one element")


def _prepare(x: Tensor, y: Tensor | None, factor: Tensor | None, alpha: float, beta: float) -> tuple[Any, ...]:
    """Convert a y of another type than the kernels take, and copy one that would change while it is read."""
    if y is not None:
        if y.dtype == torch.float16 and x.dtype == torch.float32:
            y = y.float()  # exact
        first, begin = x.data_ptr(), y.data_ptr()
        if x.is_contiguous() and y.is_contiguous():
            near = first - y.nbytes < begin < first + x.nbytes
        else:
            near = may_overlap(x, y)
        if near and (begin, y.dtype, y.stride()) != (first, x.dtype, x.stride()):
            y = y.clone()
    return x, y, factor, alpha, beta


def _plan(x: Meta, y: Meta | None, device: int) -> Steps:
    other = y or x
    shape = x.shape or (1,)
    rows, cols = row_count(shape), shape[-1]
    strides = [row_stride(shape, meta.stride or (1,)) for meta in (x, other)]
    if strides == [cols, cols]:
        rows, cols = 1, rows * cols
        strides = [cols, cols]
    n = 16 // max(x.dtype.itemsize, other.dtype.itemsize)
    # Every access is of n elements: 16 bytes of the larger type.
    starts = [meta.misaligned // meta.dtype.itemsize for meta in (x, other)]
    aligned16 = vector_bytes(*starts, cols, *strides, limit=n) == n
    cut = row_slices(rows, cols, 2 * n if aligned16 else 8, limit=_THREADS)
    launch = _KERNEL.bind((x.token, DTYPE_TOKEN[other.dtype]), device, cut.grid, cut.block)
    sizes = rows, cols, *strides, cut.threads_per_row, cut.slices_per_row, aligned16
    return Steps(Step(launch, "x", "y", "factor", *sizes, "alpha", "beta"))


def _reference(x: Tensor, y: Tensor | None, factor: Tensor | None, alpha: float, beta: float) -> None:
    if x.numel() == 0:
        return
    alpha, beta = (constant(v, torch.float32, x.device) for v in (alpha, beta))
    if factor is not None:
        beta = beta * factor.reshape(())
    if y is None:
        x.copy_(x.float() * beta)
        return
    # An fp64 sum of the two exact products, as good as fused.
    added = y.double() * alpha.double()
    x.copy_(torch.where(beta != 0, x.double() * beta.double() + added, added).float())


ADD = Operator(
    "add_in_place",
    (InPlaceRows("x", over="y"), Rows("y", None, optional=True), Argument("factor", None, optional=True)),
    options="float alpha, float beta", numbers="alpha beta", results="", plan=_plan, reference=_reference, check=_check,
    prepare=_prepare,
)  # fmt: skip


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, alpha: float, beta: float, copied: bool) -> Tensor:
        ctx.factors, ctx.dtypes = (beta, alpha), (x.dtype, y.dtype)
        if copied:
            x = x.clone()
        else:
            ctx.mark_dirty(x)
        ADD(x, y, None, alpha, beta)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor) -> tuple[Any, ...]:
        gradients = [
            (dx if factor == 1.0 else dx.float() * factor).to(dtype) if wanted else None
            for factor, dtype, wanted in zip(ctx.factors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        ]
        return *gradients, None, None, None


_differentiable_add = applied(_Add)


@public(recent=False, options={"alpha": Within("float"), "beta": Within("float")})
def add_(x: Tensor, y: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Set ``x = beta * x + alpha * y`` and return x, for gradient accumulation or, with beta 0, a scaled cast.

    Computed in fp32 and rounded once. With beta 0, x is not read, so NaN in x does not matter. Differentiable once, in
    x and y; x must not be a leaf that requires grad.

    Args:
        x: bfloat16, float16 or float32, any shape; overwritten. Any strides without overlap (copied unless rows are
            unit-stride and evenly spaced).
        y: A tensor of x's shape and dtype, or bfloat16 or float16 for a float32 x. Any strides. May be x or overlap it
            (then it is copied).
        alpha: Factor of y.
        beta: Factor of x.

    Returns:
        x.
    """
    if y is None:
        raise ArgumentError("y is None; expected a tensor like x (scale_ takes none)")
    alpha, beta = float(alpha), float(beta)
    if torch.is_grad_enabled() and (x.requires_grad or getattr(y, "requires_grad", False)):
        refuse_leaf("x", x)
        if written_by_copy(True):
            return x.copy_(_differentiable_add(x, y, alpha, beta, True))
        return _differentiable_add(x, y, alpha, beta, False)
    ADD(x, y, None, alpha, beta)
    return x


@public(recent=False, no_gradients="x")
def scale_(x: Tensor, factor: float | Tensor) -> Tensor:
    """Set ``x = factor * x`` and return x.

    Computed in fp32 and rounded once: NaN stays NaN, and an infinity times 0 is NaN. Not differentiable.

    Args:
        x: bfloat16, float16 or float32, any shape; overwritten. Any strides without overlap (copied unless rows are
            unit-stride and evenly spaced).
        factor: A number, or one float32 element on x's device, which the host never reads.

    Returns:
        x.
    """
    if isinstance(factor, Tensor):
        ADD(x, None, factor.detach(), 0.0, 1.0)
    else:
        ADD(x, None, None, 0.0, float(check_number("factor", factor)))
    return x


OP = Op("inplace", public=("add_", "scale_"), kernels=(_KERNEL,), torch_ops=(ADD,))
