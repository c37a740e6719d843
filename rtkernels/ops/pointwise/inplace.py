"""Adding to a tensor and scaling it, in its own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import check_same, metadata, row_count, row_stride, rowed, runs, token, vector_bytes
from rtkernels.runtime.operator.arguments import a_number
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

_PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")]
_KERNEL = Kernel(
    "pointwise/inplace.cu",
    "add_in_place",
    template="T U",
    args="x:ptr y:ptr factor:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 threads_per_row:i64 runs_per_row:i64 "
    "wide:i64 alpha:f64 beta:f64",
    variants=_PAIRS,
    max_registers=80,
)

_THREADS = 128

# ---- launchers ------------------------------------------------------------------------------------------------------


def _check(x: tuple[Any, ...], y: tuple[Any, ...] | None, factor: tuple[Any, ...] | None) -> tuple[str, str]:
    t = u = token("x", x[0])
    if y is not None:
        u = token("y", y[0], (torch.float32, torch.bfloat16, torch.float16) if t == "fp32" else (x[0],))
        check_same("y", y[1], x[1], "shape")
        check_same("y", y[3], x[3], "device index")
    if factor is not None:
        token("factor", factor[0], (torch.float32,))
        if row_count((*factor[1], 1)) != 1:
            raise ArgumentError(f"factor has shape {tuple(factor[1])}; expected one element")
        check_same("factor", factor[3], x[3], "device index")
    return t, u


def _plan(x, y, factor, align: int):
    """Return launch, numbers and from where to where x and y reach in bytes; None if x is no stack of rows.

    The launch is None if there is nothing to do.
    """
    t, u = _check(x, y, factor)
    shape = x[1] or (1,)
    if 0 in shape:
        return None, (), 0, 0
    steps = [row_stride(shape, m[2] or (1,)) for m in (x, y or x)]
    if None in steps:
        return None
    if steps[0] < shape[-1] and row_count(shape) > 1:
        raise ArgumentError("x has overlapping rows; it needs memory of its own for every element")
    rows, cols = row_count(shape), shape[-1]
    sizes = x[0].itemsize, (y or x)[0].itemsize
    reach = [((rows - 1) * step + cols) * size for step, size in zip(steps, sizes, strict=True)]
    if steps == [cols, cols]:
        rows, cols = 1, rows * cols
        steps = [cols, cols]
    n = 16 // max(sizes)
    # Every access is of n elements: 16 bytes of the wider type.
    wide = vector_bytes(align, cols, *steps, most=n) == n
    vec, in_flight = (n, 2) if wide else (1, 8)
    cut = runs(rows, cols, vec * in_flight, most=_THREADS)
    return _KERNEL.bind((t, u), x[3], cut.grid, cut.block), (rows, cols, *steps, *cut[:2], wide), *reach


_PLANS = Plans(_plan)


def _elements(address: int, size: int) -> int:
    """Return an address in elements, as far as alignment goes: odd if it is not even a multiple of their size."""
    return address // size % 16


def _launch(x: Tensor, y: Tensor | None, factor: Tensor | None, alpha: float, beta: float) -> None:
    if y is not None and y.dtype == torch.float16 and x.dtype == torch.float32:
        y = y.float()  # exact
    if y is not None and x.dim() and y.shape == x.shape:
        y = rowed(y)
    address = x.data_ptr()
    align = _elements(address, x.itemsize)
    y_address = 0
    if y is not None:
        y_address = y.data_ptr()
        align |= _elements(y_address, y.itemsize)
    plan = _PLANS[metadata(x), metadata(y), metadata(factor), align]
    if plan is None:
        dense = x.contiguous()
        _launch(dense, y, factor, alpha, beta)
        x.copy_(dense)
        return
    launch, args, x_bytes, y_bytes = plan
    if launch is not None:
        near = address - y_bytes < y_address < address + x_bytes
        if near and (y_address, metadata(y)) != (address, metadata(x)):  # y would change while it is read
            return _launch(x, y.clone(), factor, alpha, beta)
        launch(address, y_address, 0 if factor is None else factor.data_ptr(), *args, alpha, beta)
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _reference(x: Tensor, y: Tensor | None, factor: Tensor | None, alpha: float, beta: float) -> None:
    _check(metadata(x), metadata(y), metadata(factor))
    if x.numel() == 0:
        return
    if x.dim() and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        raise ArgumentError("x has overlapping rows; it needs memory of its own for every element")
    alpha, beta = (torch.tensor(v, dtype=torch.float32, device=x.device) for v in (alpha, beta))
    if factor is not None:
        beta = beta * factor.reshape(())
    if y is None:
        x.copy_(x.float() * beta)
        return
    # An fp64 sum of the two exact products, as good as fused.
    added = y.double() * alpha.double()
    x.copy_(torch.where(beta != 0, x.double() * beta.double() + added, added).float())


def _fake(x, y, factor, alpha, beta):
    return None


ADD = TorchOp(
    "add_in_place(Tensor(a!) x, Tensor? y, Tensor? factor, float alpha, float beta) -> ()",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)


# ---- public ---------------------------------------------------------------------------------------------------------


def add_(x: Tensor, y: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Set ``x = beta * x + alpha * y`` and return x: gradient accumulation, or with beta 0 a scaled copy with a cast.

    Computed in fp32 and rounded once. With beta 0, x is not read: what it holds, NaN included, does not matter. Not
    differentiable.

    Args:
        x: bfloat16, float16 or float32, any shape; overwritten. Any strides without overlap (a copy is made unless rows
            are unit-stride and evenly spaced).
        y: Of x's shape and dtype, or bfloat16 or float16 for a float32 x. Any strides. May be x, or share memory with
            it (then a copy is made).
        alpha: Factor of y.
        beta: Factor of x.

    Returns:
        x.
    """
    if not isinstance(x, Tensor):
        return interop.call(add_, x, y, alpha=alpha, beta=beta)
    if y is None:
        raise ArgumentError("y is None; expected a tensor like x (scale_ goes without)")
    refuse_gradients("add_", (x, y))
    ADD(x, y, None, float(a_number("alpha", alpha)), float(a_number("beta", beta)))
    return x


def scale_(x: Tensor, factor: float | Tensor) -> Tensor:
    """Set ``x = factor * x`` and return x.

    Computed in fp32 and rounded once: NaN stays NaN, and an infinity times 0 is NaN. Not differentiable.

    Args:
        x: bfloat16, float16 or float32, any shape; overwritten. Any strides without overlap (a copy is made unless rows
            are unit-stride and evenly spaced).
        factor: A number, or one float32 element on x's device, which the host never reads.

    Returns:
        x.
    """
    if not isinstance(x, Tensor):
        return interop.call(scale_, x, factor)
    refuse_gradients("scale_", (x,))
    if isinstance(factor, Tensor):
        ADD(x, None, factor.detach(), 0.0, 1.0)
    else:
        ADD(x, None, None, 0.0, float(a_number("factor", factor)))
    return x


OP = Op("inplace", public=("add_", "scale_"), kernels=(_KERNEL,), torch_ops=(ADD,))
