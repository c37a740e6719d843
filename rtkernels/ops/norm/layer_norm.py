"""Layer normalisation over the last dimension, with optional residual addition, and its backward."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.layer_norm_operators import ADD_FORWARD, BACKWARD, BACKWARD_OVER, FORWARD
from rtkernels.ops.norm.layer_norm_plan import KERNELS
from rtkernels.ops.norm.norm_modulated import normalize
from rtkernels.ops.norm.statistics import with_statistics
from rtkernels.ops.shared.block_sum import weight_gradient
from rtkernels.ops.shared.row_quant import Quant
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import starts_from_result
from rtkernels.runtime.invariance import state as invariance
from rtkernels.runtime.layout import may_overlap
from rtkernels.runtime.operator import autograd
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

_forward, _add_forward, _backward = FORWARD.call, ADD_FORWARD.call, BACKWARD.call


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps, offset, overwrites):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.overwrites = eps, offset, overwrites
        ctx.starts = None
        if invariance.highest:
            ctx.starts = start_of(weight, "layer_norm"), start_of(bias, "layer_norm")
        if residual is None:
            ctx.save_for_backward(x, weight, bias)
            return _forward(x, weight, bias, eps, offset)
        y, total = _add_forward(x, residual, weight, bias, eps, offset)
        ctx.save_for_backward(total, weight, bias)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum=None):
        if dy is None:
            return dsum, None, None, dsum, None, None, None
        if ctx.overwrites:
            autograd.check_overwrite(ctx, "layer_norm", (dy, dsum))
        h, weight, bias = ctx.saved_tensors
        want_weight, want_bias, want_residual = ctx.needs_input_grad[1:4]
        dweight = dbias = None
        if (want_weight or want_bias) and starts_from_result():
            starts = ctx.starts or (None, None)
            if want_weight:
                dweight = weight_gradient(starts[0], weight, dy, h, ctx.eps, centred=True)
            if want_bias:
                dbias = weight_gradient(starts[1], bias, dy)
            want_weight = want_bias = False
        rest = weight, bias if want_bias else None, dsum, ctx.eps, ctx.offset, want_weight or want_bias
        if ctx.overwrites and not may_overlap(dy, h) and (dsum is None or not may_overlap(dsum, h)):
            (dh,) = autograd.detached(h)
            gradients = BACKWARD_OVER(dy, dh, *rest)
        else:
            dh, gradients = _backward(dy, h, *rest)
        dweight = gradients[0] if want_weight else dweight
        dbias = gradients[1] if want_bias else dbias
        return dh, dweight, dbias, dh if want_residual else None, None, None, None


_differentiable = applied(_LayerNorm)


@public(over="x residual")
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, offset: float = 0.0,
    residual: Tensor | None = None, rstd: Tensor | None = None, mean: Tensor | None = None,
    return_statistics: bool = False, out: Tensor | tuple[Tensor | None, ...] | None = None, reuse: str | None = None,
    gate: Tensor | None = None, x_bias: Tensor | None = None, scale: Tensor | None = None,
    shift: Tensor | None = None, style: Tensor | None = None, channel_scale: Tensor | None = None,
    quant: Quant | torch.dtype | str | None = None, keep: bool = False, residual_out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Normalise the last dimension to mean 0 and variance 1.

    ``y = (h - mean(h)) / sqrt(var(h) + eps) * (offset + weight) + bias`` with ``h = x``, or ``h = x + residual``
    rounded to the dtype of x. Computed in fp32 and rounded once; the variance is computed from the differences to the
    mean, so a large mean costs no precision. Differentiable once in x, weight, bias and residual.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly
            spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        weight: ``[n]`` in x's dtype or float32. Default: ones (`offset` is then not used).
        bias: ``[n]`` in the weight's dtype. Default: zeros.
        eps: Added to the variance.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Added to x first; same shape and dtype as x.
        rstd: As for :func:`rms_norm`, with the variance of x instead of its mean square. Requires `mean`.
        mean: float32, shape as rstd: ``mean(x)``.
        return_statistics: Also return rstd and mean, as the last results; they have no gradient.
        out: As for :func:`rms_norm`; may be x or residual itself.
        reuse: As for :func:`rms_norm`. Not with statistics or out.
        gate: As for :func:`rms_norm`. This and all following options cannot be combined with rstd, mean,
            return_statistics or reuse; their order of application is described there.
        x_bias: ``[n]``, added to x first; the `bias` of :func:`rms_norm`.
        scale: ``1 + scale`` multiplies the normalised row; shape and dtype as for gate.
        shift: Added after that; shape and dtype as for gate.
        style: ``[..., 3 n]``: scale, shift and, returned as a view, the gate of the next call.
        channel_scale: ``[n]``, factor of the result.
        quant: Quantise the result (:class:`rtkernels.Quant`); a dtype or "nvfp4" means ``Quant(dtype)``.
        keep: With quant: also return the values before quantisation, in x's dtype.
        residual_out: Tensor to write the sum to; may be residual or x.
        scale_out: Tensor to write the computed scales to.

    Returns:
        ``y``, contiguous unless it is `out`, in x's shape and dtype; with a residual ``(y, h)``; with return_statistics
        ``(y, rstd, mean)`` or ``(y, h, rstd, mean)``. With gate or an option after it, as for :func:`rms_norm`.
    """
    # In a condition, `is not None` is one jump; a chain of `is` takes three times the instructions.
    if (
        keep or gate is not None or x_bias is not None or scale is not None or shift is not None or style is not None
        or channel_scale is not None or quant is not None or residual_out is not None or scale_out is not None
    ):  # fmt: skip
        if rstd is not None or mean is not None or return_statistics or reuse is not None:
            raise ArgumentError("rstd, mean, return_statistics and reuse exclude gate and the options after it")
        return normalize(
            x, weight, bias, eps=eps, offset=offset, centred=True, residual=residual, gate=gate, bias=x_bias,
            scale=scale, shift=shift, style=style, channel_scale=channel_scale, quant=quant, keep=keep,
            residual_out=residual_out, scale_out=scale_out,
        )  # fmt: skip
    overwrites = False
    if reuse is not None:
        if rstd is not None or mean is not None or return_statistics:
            raise ArgumentError("reuse cannot be combined with rstd, mean or return_statistics")
        # With a residual, what is saved and overwritten is the sum made here.
        overwrites = autograd.may_overwrite(reuse, {"x": x} if residual is None else {}, (weight, bias))
    if rstd is not None or mean is not None or return_statistics:
        return with_statistics(x, weight, bias, residual, rstd, mean, eps, offset, True, return_statistics)
    if is_grad_enabled() and (needs_grad(x, weight, bias) or needs_grad(x, residual)):
        if is_dynamo_compiling():
            eps, offset = constant(eps), constant(offset)
        return _differentiable(x, weight, bias, residual, eps, offset, overwrites)
    if residual is None:
        return _forward(x, weight, bias, eps, offset)
    return _add_forward(x, residual, weight, bias, eps, offset)


OP = Op(
    "layer_norm", public=("layer_norm",), kernels=KERNELS,
    torch_ops=(FORWARD, ADD_FORWARD, BACKWARD, BACKWARD_OVER),
    uses=("norm_fp8", "norm_modulated", "norm_modulated_bwd", "combine", "column_sum", "block_sum"),
)  # fmt: skip
