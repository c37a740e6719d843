"""A gated MLP by fp8 codes as one step of the graph: the gradient of gate and up exists as codes alone.

As separate steps, the gradient of the activation is written in 16 bits and read again to be quantised, which is the
largest tensor of a decoder layer two times over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import rtkernels
from rtkernels.models.reuse import free
from rtkernels.ops.act import glu_fp8
from rtkernels.ops.gemm.fp8_operands import OPERAND, Codes, columns_of, rows_of
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.runtime.operator.autograd import once_differentiable

_E4M3 = torch.float8_e4m3fn
_PRODUCT, _WEIGHT_GRADIENT = "block_1x128_128x128", "block_1x128_1x128"


def _weight_codes(weight: Tensor, given: Any, transposed: bool) -> Any:
    return OPERAND(weight, "block", _E4M3, False, True, transposed, 0) if given is None else given


def _product(
    left: Codes, right: Codes, dtype: torch.dtype, recipe: str = _PRODUCT, add: Tensor | None = None
) -> Tensor:  # fmt: skip
    return scaled_mm(left.q, right.q, left.scale, right.scale, recipe=recipe, out_dtype=dtype, add=add)


class Norm(NamedTuple):
    """The norm that made codes of x: its input and weight, which its own gradient needs as well, and its options."""

    x: Tensor
    weight: Tensor
    eps: float
    offset: float

    def transposed(self) -> tuple[Tensor, Tensor]:
        """Return the transposed codes anew, and their scales."""
        made = rtkernels.rms_norm_fp8(self.x, self.weight, eps=self.eps, offset=self.offset, layout="transposed")
        return made.q_t, made.scale_t


class GatedMlp(torch.autograd.Function):
    """``down @ (act(gate) * up) + residual`` of codes of x, weights ``[2 * inner, hidden]`` and ``[hidden, inner]``.

    Arguments: y, which stands for x and gets the gradient; codes of x by rows and transposed, scales in columns; the
    weights; the residual, or None; the activation; whether to save weights in place of their codes; whether to save
    inputs in place of codes (gate and up are saved anyway, and so is the norm's input if there is one); the norm; codes
    of the weights, or None. Saved: transposed codes of x and of the gated values, gate and up in 16 bits, transposed
    codes of the weights.
    """

    @staticmethod
    def forward(
        ctx, y, q, scale, q_t, scale_t, gate_up, down, residual, act, save_weight, save_input, norm, up_codes,
        down_codes,
    ):  # fmt: skip
        ctx.set_materialize_grads(False)
        keep, layout = not save_weight, "row" if save_input else "both"
        ctx.owns_codes = down_codes is None
        up_codes, down_codes = _weight_codes(gate_up, up_codes, keep), _weight_codes(down, down_codes, keep)
        left, right = rows_of(q, scale, "group"), rows_of(*up_codes[:2], "block")
        hidden = _product(left, right, y.dtype)
        g_q, g_scale, *gated = glu_fp8.FORWARD(hidden, None, None, None, act, layout, False, "column", False)
        left, right = rows_of(g_q, g_scale, "group"), rows_of(*down_codes[:2], "block")
        out = _product(left, right, y.dtype, add=None if residual is None else residual.reshape(-1, down.shape[0]))
        ctx.save_for_backward(
            *((q_t, scale_t) if norm is None or not save_input else (norm.x, norm.weight)),
            hidden,
            *((None, None) if save_input else gated),
            *((up_codes[2], up_codes[1], down_codes[2], down_codes[1]) if keep else (gate_up, None, down, None)),
        )
        ctx.norm = None if norm is None or not save_input else norm[2:]
        ctx.act, ctx.keep, ctx.save_input, ctx.shape = act, keep, save_input, y.shape
        ctx.dtypes, ctx.sizes = (gate_up.dtype, down.dtype), (gate_up.shape, down.shape)
        return out.view(*y.shape[:-1], down.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 14
        q_t, scale_t, hidden, g_q_t, g_scale_t, up_t, up_scale, down_t, down_scale = ctx.saved_tensors
        need_x, need_up, need_down = ctx.needs_input_grad[0], ctx.needs_input_grad[5], ctx.needs_input_grad[6]
        (rows, columns), (hidden_size, inner) = ctx.sizes
        dx = dup = ddown = None
        flat = dout.reshape(-1, hidden_size)
        d_q, d_scale, d_q_t, d_scale_t = OPERAND(flat, "group", _E4M3, False, True, need_down, 0)
        if need_down:
            if ctx.save_input:
                made = glu_fp8.FORWARD(hidden, None, None, None, ctx.act, "transposed", False, "row", False)
                g_q_t, g_scale_t = made[2:]
            left = columns_of(d_q_t, d_scale, d_scale_t, "group", hidden_size)
            right = columns_of(g_q_t, g_scale_t, g_scale_t, "group", inner)
            ddown = _product(left, right, ctx.dtypes[1], _WEIGHT_GRADIENT)
            free(g_q_t)
        if need_x or need_up:
            if not ctx.keep:
                _, down_scale, down_t, _ = OPERAND(down_t, "block", _E4M3, False, False, True, 0)
            left, right = rows_of(d_q, d_scale, "group"), columns_of(down_t, down_scale, down_scale, "block", inner)
            dy = _product(left, right, dout.dtype)
            del d_q, d_scale, d_q_t, d_scale_t, left, right
            if ctx.owns_codes and ctx.keep:
                free(down_t)
            d_q, d_scale, d_q_t, d_scale_t, _, _ = glu_fp8.BACKWARD(
                dy, hidden, None, None, None, ctx.act, "both", False, "column", False, "fp8", False
            )
            del dy
            free(hidden)
        if need_x:
            if not ctx.keep:
                _, up_scale, up_t, _ = OPERAND(up_t, "block", _E4M3, False, False, True, 0)
            left, right = rows_of(d_q, d_scale, "group"), columns_of(up_t, up_scale, up_scale, "block", columns)
            dx = _product(left, right, dout.dtype).view(ctx.shape)
        if need_up:
            if ctx.norm is not None:
                q_t, scale_t = Norm(q_t, scale_t, *ctx.norm).transposed()
            left = columns_of(d_q_t, d_scale_t, d_scale_t, "group", rows)
            right = columns_of(q_t, scale_t, scale_t, "group", columns)
            dup = _product(left, right, ctx.dtypes[0], _WEIGHT_GRADIENT)
        return dx, *(None,) * 4, dup, ddown, dout if ctx.needs_input_grad[7] else None, *(None,) * 6
