"""Results of the normalisations in memory that the caller gives, and with statistics that the caller keeps."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.norm_fp8_operators import FORWARD
from rtkernels.runtime.layout import check_same, extent, may_overlap
from rtkernels.runtime.operator.autograd import constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.gradient import applied
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.torch_private import is_dynamo_compiling

# ---- memory of the caller -------------------------------------------------------------------------------------------


def check_out(out: Tensor, x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> None:
    """Raise an ArgumentError unless `out` can take a result of x's shape and dtype.

    It may be x or the residual itself: every element is read before it is written, by the same thread.
    """
    check_same("out", out.dtype, x.dtype, "dtype")
    check_same("out", out.shape, x.shape, "shape")
    check_same("out", out.get_device(), x.get_device(), "device index")
    if out.numel() == 0:
        return
    first, last = extent(out)
    if last - first < out.numel() * out.itemsize:
        raise ArgumentError(f"out has strides {out.stride()}; expected memory of its own for every element")
    for name, t in (("x", x), ("residual", residual), *(("weight or bias", v) for v in vectors)):
        if t is None:
            continue
        same = name in ("x", "residual") and t.data_ptr() == out.data_ptr() and t.stride() == out.stride()
        if not same and may_overlap(out, t):
            raise ArgumentError(f"out overlaps {name}; expected memory of its own, or exactly x or residual")


def check_over(h: Tensor, *others: Tensor | None) -> None:
    """Raise an ArgumentError unless the gradient of `h` can be written over it."""
    if not h.is_contiguous():
        raise ArgumentError(f"h has strides {h.stride()}; expected a dense tensor to write the gradient over")
    if any(t is not None and may_overlap(h, t) for t in others):
        raise ArgumentError("h shares memory with another input; expected its own to write the gradient over")


def check_no_gradient(out: Tensor, *inputs: Tensor | None) -> None:
    """Raise an ArgumentError if a call with `out` would have to be recorded."""
    if recorded(out, *inputs):
        raise ArgumentError(
            "out is given but a tensor needs gradients; expected torch.no_grad() around the call, detached tensors, or "
            "no out"
        )


def recorded(*tensors: Tensor | None) -> bool:
    """Return True if autograd records a call with these tensors."""
    return is_grad_enabled() and any(needs_grad(t) for t in tensors if t is not None)


# ---- statistics in and out ------------------------------------------------------------------------------------------

# The backward operators of rms_norm and layer_norm, put here by these two, by `centred`.
BACKWARDS: dict[bool, TorchOp] = {}


class _Statistics(torch.autograd.Function):
    """A normalisation with its statistics as results that have no gradient (first), or as inputs that need none."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, rstd, mean, eps, offset, centred):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.centred = eps, offset, centred
        made = _run(x, weight, bias, residual, rstd, mean, eps, offset, centred)
        ctx.save_for_backward(x if residual is None else made[-1], weight, bias)
        ctx.statistics = 0 if rstd is not None else 1 + centred
        ctx.mark_non_differentiable(*made[: ctx.statistics])
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        dy, dsum = (*grads[ctx.statistics :], None)[:2]
        rest = (None,) * 5
        if dy is None:
            return dsum, None, None, dsum, *rest
        h, weight, bias = ctx.saved_tensors
        _, want_weight, want_bias, want_residual, *_ = ctx.needs_input_grad
        dh, *parameters = backward(
            ctx.centred, dy, h, weight, bias, dsum, ctx.eps, ctx.offset, want_weight, want_bias
        )  # fmt: skip
        return dh, *parameters, dh if want_residual else None, *rest


_differentiable = applied(_Statistics)


def backward(centred, dy, h, weight, bias, dsum, eps: float, offset: float, want_weight: bool, want_bias: bool):
    """Return dh, dweight and dbias of a normalisation; None for a parameter that wants none."""
    if centred:
        dh, sums = BACKWARDS[True](
            dy, h, weight, bias if want_bias else None, dsum, eps, offset, want_weight or want_bias
        )
        return dh, sums[0] if want_weight else None, sums[1] if want_bias else None
    dh, dweight = BACKWARDS[False](dy, h, weight, dsum, eps, offset, want_weight)
    return dh, dweight if want_weight else None, None


def _run(x, weight, bias, residual, rstd, mean, eps: float, offset: float, centred: bool) -> list[Tensor]:
    """Return [rstd, [mean]] unless given, y, [sum]."""
    return FORWARD.call(x, weight, bias, residual, rstd, mean, eps, offset, "none", False, "row", True, centred)


def with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rstd: Tensor | None,
    mean: Tensor | None, eps: float, offset: float, centred: bool, wanted: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Normalise with given statistics, or return those worked out: y, then the sum, then (`wanted`) rstd and mean."""
    if recorded(x, weight, bias, residual):
        if is_dynamo_compiling():
            eps, offset = constant(eps), constant(offset)
        if rstd is not None:
            rstd, mean = rstd.detach(), mean if mean is None else mean.detach()
        made = _differentiable(x, weight, bias, residual, rstd, mean, eps, offset, centred)
    else:
        made = _run(x, weight, bias, residual, rstd, mean, eps, offset, centred)
    statistics = (rstd, mean)[: 1 + centred]
    if rstd is None:
        statistics, made = made[: 1 + centred], made[1 + centred :]
    results = (*made, *statistics) if wanted else tuple(made)
    return results if len(results) > 1 else results[0]
