"""Normalisations with statistics that the caller gives or keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.norm.checks import recorded
from rtkernels.ops.norm.layer_norm_operators import BACKWARD as LAYER_NORM_BACKWARD
from rtkernels.ops.norm.norm_fp8_operators import FORWARD
from rtkernels.ops.norm.rms_norm_operators import BACKWARD as RMS_NORM_BACKWARD
from rtkernels.runtime.operator.autograd import applied, constant, once_differentiable
from rtkernels.runtime.torch_private import is_dynamo_compiling


class _Statistics(torch.autograd.Function):
    """A normalisation with its statistics as results that have no gradient (first), or as inputs that need none."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, rstd, mean, eps, offset, centred):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.centred = eps, offset, centred
        outputs = _run(x, weight, bias, residual, rstd, mean, eps, offset, centred)
        ctx.save_for_backward(x if residual is None else outputs[-1], weight, bias)
        ctx.statistics = 0 if rstd is not None else 1 + centred
        ctx.mark_non_differentiable(*outputs[: ctx.statistics])
        return tuple(outputs)

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
    """Return dh, dweight and dbias of a normalisation; None for a parameter that needs none."""
    if centred:
        dh, sums = LAYER_NORM_BACKWARD(
            dy, h, weight, bias if want_bias else None, dsum, eps, offset, want_weight or want_bias
        )
        return dh, sums[0] if want_weight else None, sums[1] if want_bias else None
    dh, dweight = RMS_NORM_BACKWARD(dy, h, weight, dsum, eps, offset, want_weight)
    return dh, dweight if want_weight else None, None


def _run(x, weight, bias, residual, rstd, mean, eps: float, offset: float, centred: bool) -> list[Tensor]:
    """Return [rstd, [mean]] unless given, y, [sum]."""
    return FORWARD.call(x, weight, bias, residual, rstd, mean, eps, offset, "none", False, "row", True, centred)


def with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rstd: Tensor | None,
    mean: Tensor | None, eps: float, offset: float, centred: bool, wanted: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Normalise with given or computed statistics. Returns y, then the sum, then (`wanted`) rstd and mean."""
    if recorded(x, weight, bias, residual):
        if is_dynamo_compiling():
            eps, offset = constant(eps), constant(offset)
        if rstd is not None:
            rstd, mean = rstd.detach(), mean if mean is None else mean.detach()
        outputs = _differentiable(x, weight, bias, residual, rstd, mean, eps, offset, centred)
    else:
        outputs = _run(x, weight, bias, residual, rstd, mean, eps, offset, centred)
    statistics = (rstd, mean)[: 1 + centred]
    if rstd is None:
        statistics, outputs = outputs[: 1 + centred], outputs[1 + centred :]
    results = (*outputs, *statistics) if wanted else tuple(outputs)
    return results if len(results) > 1 else results[0]
