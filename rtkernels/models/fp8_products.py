"""Products of fp8 codes as autograd nodes, with as little host work between the launches as possible.

A decoder layer has a dozen such products and as many quantisations per step, so the host time around each of them
decides whether the device waits. Weights that are multiplied as one matrix enter the graph separately. Codes bypass
autograd. Every call site keeps its own last call (``Operator.at_site``).

Scales of rows are in columns everywhere, and all sizes are multiples of 16; other layers use ``fp8_linear``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.gemm.scaled_mm import FORWARD as PRODUCT
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.ops.quant.quantize_fp8 import BOTH, QUANTIZE
from rtkernels.runtime.layout import in_shape, row_count
from rtkernels.runtime.operator.autograd import applied, once_differentiable

E4M3 = torch.float8_e4m3fn
VALUES, WEIGHT_GRADIENT = "block_1x128_128x128", "block_1x128_1x128"  # recipes of ``scaled_mm``
MULTIPLE = 16

Site = Callable[..., Any]


class Codes(NamedTuple):
    """Codes of a matrix by rows with scales in columns, transposed codes or None; y stands for it in the graph."""

    q: Tensor
    scale: Tensor
    q_t: Tensor | None
    scale_t: Tensor | None
    y: Tensor


class WeightCodes(NamedTuple):
    """Codes of a weight by rows, one scale per 128 x 128 block, and transposed codes; they need `scale` transposed.

    The first three fields are the same as those of the result of ``fp8_weight``.
    """

    q: Tensor
    scale: Tensor
    q_t: Tensor | None


def multiply(
    site: Site | None, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, recipe: str = VALUES,
    bias: Tensor | None = None, add: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``a @ b.T + bias + add`` of codes, by a call site, or into `out` if given."""
    if out is not None:
        return scaled_mm(a, b, scale_a, scale_b, recipe=recipe, bias=bias, add=add, out=out)
    return site(a, b, scale_a, scale_b, None, bias, add, recipe, "auto", None, None, dtype, "auto", "auto")


def quantized(site: Site, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes of a matrix by rows, their scales in columns, transposed codes and their scales."""
    return site(x, "group", E4M3, False, "column")


class Sites(NamedTuple):
    """Call sites of the operators for weights of one shape."""

    codes: Site
    codes_by_rows: Site
    product: Site
    incoming: Site
    dx: Site
    dw: Site

    @classmethod
    def new(cls) -> Sites:
        """Return fresh call sites."""
        forward, dx, dw = (PRODUCT.at_site() for _ in range(3))
        return cls(BOTH.at_site(), QUANTIZE.at_site(), forward, BOTH.at_site(), dx, dw)

    def weight_codes(self, weight: Tensor, transposed: bool) -> WeightCodes:
        """Return the codes of a weight."""
        if transposed:
            return WeightCodes(*self.codes(weight, "block", E4M3, False, "row")[:3])
        return WeightCodes(*self.codes_by_rows(weight, "block", E4M3, False, "row"), None)


@lru_cache(maxsize=256)
def sites_of(shape: torch.Size) -> Sites:
    """Return the call sites for weights of a shape: in most models all layers have the same shapes."""
    return Sites.new()


def split_gradient(dw: Tensor | None, rows: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Return the gradients of weights that were multiplied as one matrix."""
    if dw is None:
        return (None,) * len(rows)
    return (dw,) if len(rows) == 1 else dw.split(rows)


class _Linear(torch.autograd.Function):
    """``x @ [weights]^T + bias``. Saves transposed codes of x and, unless `save_weight`, those of the weights."""

    @staticmethod
    def forward(ctx, y, bias, codes, matrix, given, save_weight, at, *weights):
        ctx.set_materialize_grads(False)
        keep = ctx.needs_input_grad[0]
        weight_codes = given or at.weight_codes(matrix, keep and not save_weight)
        q = codes.q if codes.q.dim() == 2 else codes.q.view(-1, codes.q.shape[-1])
        out = multiply(at.product, q, weight_codes.q, codes.scale.t(), weight_codes.scale, y.dtype, bias=bias)
        trains = any(ctx.needs_input_grad[7:])
        ctx.save_for_backward(
            *((codes.q_t, codes.scale_t) if trains else (None, None)),
            *((None, None) if not keep else (matrix, None) if save_weight else (weight_codes.q_t, weight_codes.scale)),
        )  # fmt: skip
        ctx.at, ctx.save_weight, ctx.shape, ctx.dtype = at, save_weight, y.shape, matrix.dtype
        ctx.bias_dtype, ctx.rows = None if bias is None else bias.dtype, [w.shape[0] for w in weights]
        return in_shape(out, *y.shape[:-1], matrix.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        at, count = ctx.at, len(ctx.rows)
        if dy is None:
            return (None,) * (7 + count)
        x_q_t, x_scale_t, w_q_t, w_scale = ctx.saved_tensors
        need_x, need_bias, *_ = ctx.needs_input_grad
        flat, dx, dw, dbias = dy.reshape(row_count(ctx.shape), dy.shape[-1]), None, None, None
        if x_q_t is None:  # frozen weights
            q, scale = QUANTIZE.call(flat, "group", E4M3, False, "column")
        else:
            q, scale, q_t, scale_t = quantized(at.incoming, flat)
        if need_x:
            if ctx.save_weight:
                w_scale, w_q_t = at.weight_codes(w_q_t, True)[1:]
            dx = multiply(at.dx, q, w_q_t, scale.t(), w_scale.t(), dy.dtype).view(ctx.shape)
        if x_q_t is not None:
            dw = multiply(at.dw, q_t, x_q_t, scale_t.t(), x_scale_t.t(), ctx.dtype, WEIGHT_GRADIENT)
        if need_bias:
            dbias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dbias, None, None, None, None, None, *split_gradient(dw, ctx.rows)


linear = applied(_Linear)
