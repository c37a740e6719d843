"""A gated MLP by fp8 codes as one step of the graph: the gradient of gate and up exists as codes alone.

As separate steps, the gradient of the activation is written in 16 bits and read again to be quantised, which is the
largest tensor of a decoder layer two times over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.models.reuse import free
from rtkernels.ops.act import glu_fp8
from rtkernels.ops.gemm.fp8_operands import OPERAND, Codes, columns_of, rows_of
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.runtime.operator.autograd import once_differentiable

_E4M3 = torch.float8_e4m3fn
_PRODUCT, _WEIGHT_GRADIENT = "block_1x128_128x128", "block_1x128_1x128"


def _weight_codes(weight: Tensor, given: Any, transposed: bool) -> Any:
    return OPERAND(weight, "block", _E4M3, False, True, transposed, 0) if given is None else given


def _product(left: Codes, right: Codes, dtype: torch.dtype, recipe: str = _PRODUCT) -> Tensor:
    return scaled_mm(left.q, right.q, left.scale, right.scale, recipe=recipe, out_dtype=dtype)


class GatedMlp(torch.autograd.Function):
    """``down @ (act(gate) * up)`` of codes of x, with weights ``[2 * inner, hidden]`` and ``[hidden, inner]``.

    Arguments: y, which stands for x and gets the gradient; codes of x by rows and transposed, scales in columns; the
    weights; the activation; whether to save weights in place of their codes; codes of the weights, or None. Saved:
    transposed codes of x and of the gated values, gate and up in 16 bits, transposed codes of the weights.
    """

    @staticmethod
    def forward(ctx, y, q, scale, q_t, scale_t, gate_up, down, act, save_weight, up_codes, down_codes):
        ctx.set_materialize_grads(False)
        keep = not save_weight
        up_codes, down_codes = _weight_codes(gate_up, up_codes, keep), _weight_codes(down, down_codes, keep)
        left, right = rows_of(q, scale, "group"), rows_of(*up_codes[:2], "block")
        hidden = _product(left, right, y.dtype)
        g_q, g_scale, g_q_t, g_scale_t = glu_fp8.FORWARD(hidden, None, None, None, act, "both", False, "column", False)
        left, right = rows_of(g_q, g_scale, "group"), rows_of(*down_codes[:2], "block")
        out = _product(left, right, y.dtype)
        ctx.save_for_backward(
            q_t, scale_t, hidden, g_q_t, g_scale_t,
            *((up_codes[2], up_codes[1], down_codes[2], down_codes[1]) if keep else (gate_up, None, down, None)),
        )  # fmt: skip
        ctx.act, ctx.keep, ctx.shape = act, keep, y.shape
        ctx.dtypes, ctx.sizes = (gate_up.dtype, down.dtype), (gate_up.shape, down.shape)
        return out.view(*y.shape[:-1], down.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 11
        q_t, scale_t, hidden, g_q_t, g_scale_t, up_t, up_scale, down_t, down_scale = ctx.saved_tensors
        need_x, need_up, need_down = ctx.needs_input_grad[0], ctx.needs_input_grad[5], ctx.needs_input_grad[6]
        if not ctx.keep:
            _, up_scale, up_t, _ = OPERAND(up_t, "block", _E4M3, False, False, True, 0)
            _, down_scale, down_t, _ = OPERAND(down_t, "block", _E4M3, False, False, True, 0)
        (rows, columns), (hidden_size, inner) = ctx.sizes
        dx = dup = ddown = None
        flat = dout.reshape(-1, hidden_size)
        d_q, d_scale, d_q_t, d_scale_t = OPERAND(flat, "group", _E4M3, False, True, need_down, 0)
        if need_down:
            left = columns_of(d_q_t, d_scale, d_scale_t, "group", hidden_size)
            right = columns_of(g_q_t, g_scale_t, g_scale_t, "group", inner)
            ddown = _product(left, right, ctx.dtypes[1], _WEIGHT_GRADIENT)
            free(g_q_t)
        if need_x or need_up:
            left, right = rows_of(d_q, d_scale, "group"), columns_of(down_t, down_scale, down_scale, "block", inner)
            dy = _product(left, right, dout.dtype)
            del d_q, d_scale, d_q_t, d_scale_t
            d_q, d_scale, d_q_t, d_scale_t, _, _ = glu_fp8.BACKWARD(
                dy, hidden, None, None, None, ctx.act, "both", False, "column", False, "fp8", False
            )
            del dy
            free(hidden)
        if need_x:
            left, right = rows_of(d_q, d_scale, "group"), columns_of(up_t, up_scale, up_scale, "block", columns)
            dx = _product(left, right, dout.dtype).view(ctx.shape)
        if need_up:
            left = columns_of(d_q_t, d_scale_t, d_scale_t, "group", rows)
            right = columns_of(q_t, scale_t, scale_t, "group", columns)
            dup = _product(left, right, ctx.dtypes[0], _WEIGHT_GRADIENT)
        return dx, *(None,) * 4, dup, ddown, *(None,) * 4
