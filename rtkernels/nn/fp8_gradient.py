"""Functions whose gradient leaves as fp8 codes, for whoever multiplies with it next.

Autograd hands over tensors of the dtype of what they are gradients of. Codes travel on such a tensor as an attribute
(:func:`fp8_gradient` gives them), and the tensor itself needs no memory: it is one NaN, seen with the shape of the
gradient. Whoever uses its values, because it does not know of the codes or because two gradients were added, gets NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.act.glu_fp8 import GluFp8, glu_fp8, glu_fp8_backward
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import moe_unpermute
from rtkernels.ops.moe.moe_permute_fp8 import moe_permute_fp8

_ATTRIBUTE = "_rtkernels_fp8"


def fp8_gradient(gradient: Tensor) -> Any:
    """Return the codes and scales that came with a gradient (a named tuple), or None."""
    return getattr(gradient, _ATTRIBUTE, None)


def without_memory(shape: Any, like: Tensor) -> Tensor:
    """Return NaN of a shape, in the memory of one element."""
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
        weight: As for ``glu_fp8``; gets a gradient.
        counts: As for ``glu_fp8``.
        dense: The gradient of x has values too, beside the codes.
        options: ``act``, ``layout``, ``pow2_scale``, ``scale_layout`` of ``glu_fp8``.

    Returns:
        ``(y, codes)``: y has the shape of the result and no memory (its values are NaN); the gradient of the result
        enters through it, so give it to the ``autograd.Function`` that multiplies `codes`. The gradient of x carries a
        :class:`GluFp8Gradients` for :func:`fp8_gradient`.
    """
    y, *codes = _Glu.apply(x, weight, counts, dense, options)
    return y, GluFp8(*codes)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, index: MoeIndex, options: dict) -> Tensor:
        ctx.index, ctx.options, ctx.like = index, options, (y.shape, y.new_empty(0))
        return moe_unpermute(y, index)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        shape, like = ctx.like
        return _carrying(without_memory(shape, like), moe_permute_fp8(dout, ctx.index, **ctx.options)), None, None


def unpermute_with_fp8_gradient(y: Tensor, index: MoeIndex, **options: Any) -> Tensor:
    """Add up the rows of each token as :func:`rtkernels.moe_unpermute` does; the gradient of y leaves as fp8 codes.

    Args:
        y: As for ``moe_unpermute``.
        index: As for ``moe_unpermute``.
        options: ``layout``, ``dtype``, ``pow2_scale`` of ``moe_permute_fp8``, which makes the codes.

    Returns:
        As ``moe_unpermute`` without probs. The gradient of y carries a :class:`MoePermutedFp8` for
        :func:`fp8_gradient`.
    """
    return _Unpermute.apply(y, index, options)
