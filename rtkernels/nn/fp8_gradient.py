"""Functions that return their gradient as fp8 codes, for the product that reads it next.

Autograd passes gradients in the dtype of their tensors. The codes travel as an attribute of such a gradient
(:func:`fp8_gradient` returns them). The gradient itself needs no memory: it is a single NaN expanded to the shape. Code
that reads its values, because it does not know of the codes or because two gradients were added, gets NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.act.glu_fp8 import GluFp8, glu_fp8, glu_fp8_backward
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import moe_unpermute
from rtkernels.ops.moe.moe_permute_fp8 import moe_permute_fp8
from rtkernels.runtime.operator.autograd import once_differentiable

_ATTRIBUTE = "_rtkernels_fp8"


def fp8_gradient(gradient: Tensor) -> Any:
    """Return the codes and scales attached to a gradient (a named tuple), or None."""
    return getattr(gradient, _ATTRIBUTE, None)


def without_memory(shape: Any, like: Tensor) -> Tensor:
    """Return NaN of a shape in the memory of one element."""
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device).expand(shape)


def _carrying(gradient: Tensor, codes: Any) -> Tensor:
    setattr(gradient, _ATTRIBUTE, codes)
    return gradient


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, counts: Tensor | None, dense: bool, options: dict) -> Any:
        codes = glu_fp8(x, weight=weight, counts=counts, **options)
        ctx.save_for_backward(x, weight, counts)
        ctx.dense, ctx.options = dense, {**options, "layout": "both"}
        ctx.mark_non_differentiable(*(t for t in codes if t is not None))
        return without_memory((*x.shape[:-1], x.shape[-1] // 2), x), *codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, counts = ctx.saved_tensors
        keep = "both" if ctx.dense else "fp8"
        codes = glu_fp8_backward(dy, x, weight=weight, counts=counts, keep=keep, **ctx.options)
        dx = codes.dx if ctx.dense else without_memory(x.shape, x)
        return _carrying(dx, codes), codes.dweight, None, None, None


def glu_with_fp8_gradient(
    x: Tensor, *, weight: Tensor | None = None, counts: Tensor | None = None, dense: bool = False, **options: Any
) -> tuple[Tensor, GluFp8]:
    """Quantise ``act(gate) * up * weight`` as :func:`rtkernels.glu_fp8` does; the gradient of x is quantised as well.

    Args:
        x: ``[..., 2 * d]``, gate and up.
        weight: As for ``glu_fp8``; differentiable.
        counts: As for ``glu_fp8``.
        dense: Also compute the values of the gradient of x, besides its codes. Default: its values are NaN.
        options: ``act``, ``layout``, ``pow2_scale``, ``scale_layout`` of ``glu_fp8``.

    Returns:
        ``(y, codes)``. y has the shape of the result and no memory; its values are NaN. It carries the gradient: pass
        it to the ``autograd.Function`` that multiplies `codes`. The gradient of x has a :class:`GluFp8Gradients`
        attached, which :func:`fp8_gradient` returns.
    """
    y, *codes = _Glu.apply(x, weight, counts, dense, options)
    return y, GluFp8(*codes)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, index: MoeIndex, options: dict) -> Tensor:
        ctx.save_for_backward(*index)
        ctx.options, ctx.like = options, (y.shape, y.new_empty(0))
        return moe_unpermute(y, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        shape, like = ctx.like
        index = MoeIndex(*ctx.saved_tensors)
        return _carrying(without_memory(shape, like), moe_permute_fp8(dout, index, **ctx.options)), None, None


def unpermute_with_fp8_gradient(y: Tensor, index: MoeIndex, **options: Any) -> Tensor:
    """Sum the rows of each token as :func:`rtkernels.moe_unpermute` does; the gradient of y is returned as fp8 codes.

    Args:
        y: As for ``moe_unpermute``.
        index: As for ``moe_unpermute``.
        options: ``layout``, ``dtype``, ``pow2_scale`` of ``moe_permute_fp8``, which computes the codes.

    Returns:
        The result of ``moe_unpermute`` without probs. The gradient of y has a :class:`MoePermutedFp8` attached, which
        :func:`fp8_gradient` returns.
    """
    return _Unpermute.apply(y, index, options)
