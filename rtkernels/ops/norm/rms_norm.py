"""RMS normalisation over the last dimension, with optional residual addition, and its backward."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.norm_modulated import normalize
from rtkernels.ops.norm.rms_norm_operators import ADD_FORWARD, BACKWARD, BACKWARD_OVER, FORWARD
from rtkernels.ops.norm.rms_norm_plan import KERNELS
from rtkernels.ops.norm.statistics import with_statistics
from rtkernels.ops.shared.block_sum import weight_gradient
from rtkernels.ops.shared.row_quant import Quant
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import starts_from_result
from rtkernels.runtime.invariance import state as invariance
from rtkernels.runtime.layout import may_overlap
from rtkernels.runtime.operator import autograd
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.main_grad import Start, start_of
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

_forward, _add_forward, _backward = FORWARD.call, ADD_FORWARD.call, BACKWARD.call


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps, offset, overwrites):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.overwrites = eps, offset, overwrites
        ctx.start = start_of(weight, "rms_norm") if invariance.highest else None
        if residual is None:
            ctx.save_for_backward(x, weight)
            return _forward(x, weight, eps, offset)
        y, total = _add_forward(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum=None):
        if dy is None:
            return dsum, None, dsum, None, None, None
        if ctx.overwrites:
            autograd.check_overwrite(ctx, "rms_norm", (dy, dsum))
        h, weight = ctx.saved_tensors
        weight_grad, in_blocks = ctx.needs_input_grad[1], None
        if weight_grad and starts_from_result():
            in_blocks = (weight_gradient(ctx.start, weight, dy, h, ctx.eps),)
            weight_grad = False
        if ctx.overwrites and not may_overlap(dy, h) and (dsum is None or not may_overlap(dsum, h)):
            (dh,) = autograd.detached(h)
            dweight = BACKWARD_OVER(dy, dh, weight, dsum, ctx.eps, ctx.offset, weight_grad)
        else:
            dh, dweight = _backward(dy, h, weight, dsum, ctx.eps, ctx.offset, weight_grad)
        dweight = in_blocks[0] if in_blocks else dweight if weight_grad else None
        return dh, dweight, dh if ctx.needs_input_grad[2] else None, None, None, None


def gradients(
    start: Start | None, dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of h and weight; that of weight is added to `start`, if it is given (level 3)."""
    if need_weight and starts_from_result():
        dweight = weight_gradient(start, weight, dy, h, eps)
        return _backward(dy, h, weight, dsum, eps, offset, False)[0], dweight
    dh, dweight = _backward(dy, h, weight, dsum, eps, offset, need_weight)
    return dh, dweight if need_weight else None


_differentiable = applied(_RmsNorm)


@public(over="x residual")
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, return_rstd: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: str | None = None,
    gate: Tensor | None = None, bias: Tensor | None = None, scale: Tensor | None = None,
    shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None = None,
    quant: Quant | torch.dtype | str | None = None, keep: bool = False, residual_out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Normalise the last dimension by its root mean square.

    ``y = h / sqrt(mean(h^2) + eps) * (offset + weight)`` with ``h = x``, or ``h = x + residual`` rounded to the dtype
    of x. Computed in fp32 and rounded once. Differentiable once in x, weight and residual.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly
            spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        weight: ``[n]`` in x's dtype or float32. Default: ones (`offset` is then not used).
        eps: Added to the mean square.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Added to x first; same shape and dtype as x.
        rstd: float32, x's shape without the last dimension: ``1 / sqrt(mean(x^2) + eps)`` from an earlier call, which
            is then not computed again. Not with a residual (pass the sum as x). Gradients are those of the whole
            normalisation, as if rstd had been computed.
        return_rstd: Also return rstd, as the last result; it has no gradient.
        out: Tensor to write y to, of its shape, dtype and device. May be x or residual itself; must not overlap another
            input. A tuple has tensors for all results in order, rstd among them (None: allocated). Not with gradients.
        reuse: ``"inputs"`` lets the backward pass overwrite the saved tensor (x, or with a residual the returned sum)
            with the gradient instead of allocating memory. The rules are those of :func:`glu`. Not with rstd or
            return_rstd.
        gate: Factor of ``x + bias`` before the residual is added: ``[n]``, ``[..., n]``, or any shape that broadcasts
            to that of x; in x's dtype or float32, any row stride. This and all following options cannot be combined
            with rstd, return_rstd or reuse, see below.
        bias: ``[n]``, added to x first.
        scale: ``1 + scale`` multiplies the normalised row; shape and dtype as for gate.
        shift: Added after that; shape and dtype as for gate.
        style: ``[..., 3 n]``: scale, shift and, returned as a view, the gate of the next call.
        channel_scale: ``[n]``, factor of the result.
        quant: Quantise the result (:class:`rtkernels.Quant`); a dtype or "nvfp4" means ``Quant(dtype)``.
        keep: With quant: also return the values before quantisation, in x's dtype.
        residual_out: Tensor to write the sum to; may be residual or x.
        scale_out: Tensor to write the computed scales to.

    Returns:
        ``y``, contiguous unless it is `out`, in x's shape and dtype; with a residual ``(y, h)``; with return_rstd
        ``(y, rstd)`` or ``(y, h, rstd)``.

    With one of the options from gate on, the call is one launch (two if the scale of a whole tensor is computed from
    the data). The steps are, in this order: ``h = residual + gate * (x + bias)``, rounded and stored; the statistics of
    the rounded h; the weight; ``* (1 + scale) + shift``; ``* channel_scale``; quantisation. If there is more than one
    result, they are returned as a :class:`rtkernels.NormOut`. Without quant, out and residual_out, the call is
    differentiable in all tensors.
    """
    # In a condition, `is not None` is one jump; a chain of `is` takes three times the instructions.
    if (
        keep or gate is not None or bias is not None or scale is not None or shift is not None or style is not None
        or channel_scale is not None or quant is not None or residual_out is not None or scale_out is not None
    ):  # fmt: skip
        if rstd is not None or return_rstd or reuse is not None:
            raise ArgumentError("rstd, return_rstd and reuse exclude gate and the options after it")
        return normalize(
            x, weight, None, eps=eps, offset=offset, centred=False, residual=residual, gate=gate, bias=bias,
            scale=scale, shift=shift, style=style, channel_scale=channel_scale, quant=quant, keep=keep,
            residual_out=residual_out, scale_out=scale_out,
        )  # fmt: skip
    overwrites = False
    if reuse is not None:
        if rstd is not None or return_rstd:
            raise ArgumentError("reuse cannot be combined with rstd or return_rstd")
        # With a residual, what is saved and overwritten is the sum made here.
        overwrites = autograd.may_overwrite(reuse, {"x": x} if residual is None else {}, (weight,))
    if rstd is not None or return_rstd:
        return with_statistics(x, weight, None, residual, rstd, None, eps, offset, False, return_rstd)
    if is_grad_enabled() and needs_grad(x, weight, residual):
        if is_dynamo_compiling():
            eps, offset = constant(eps), constant(offset)
        return _differentiable(x, weight, residual, eps, offset, overwrites)
    if residual is None:
        return _forward(x, weight, eps, offset)
    return _add_forward(x, residual, weight, eps, offset)


OP = Op(
    "rms_norm", public=("rms_norm",), kernels=KERNELS,
    torch_ops=(FORWARD, ADD_FORWARD, BACKWARD, BACKWARD_OVER),
    uses=("norm_fp8", "norm_modulated", "norm_modulated_bwd", "combine", "column_sum", "block_sum"),
)  # fmt: skip
