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
_SIDE = 128  # rows that share a scale


def _weight_codes(weight: Tensor, given: Any, transposed: bool) -> Any:
    return OPERAND(weight, "block", _E4M3, False, True, transposed, 0) if given is None else given


def _product(
    left: Codes, right: Codes, dtype: torch.dtype, recipe: str = _PRODUCT, add: Tensor | None = None,
    out: Tensor | None = None, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    more = {"out_dtype": dtype} if out is None else {"out": out, "accumulate": accumulate}
    return scaled_mm(left.q, right.q, left.scale, right.scale, recipe=recipe, add=add, **more)


def _summed(total: Tensor | None, left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a weight from some rows, added to that from the rows before them."""
    return _product(left, right, dtype, _WEIGHT_GRADIENT, out=total, accumulate=total is not None)


def _cut(rows: int, parts: int) -> list[slice]:
    """Return rows in parts that begin at multiples of 128, as groups of rows that share a scale do."""
    step = -(-rows // (_SIDE * parts)) * _SIDE
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


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
    inputs in place of codes (gate and up are saved anyway, and so is the norm's input if there is one); in how many
    parts to take the rows; the norm; codes of the weights, or None. Saved: transposed codes of x and of the gated
    values, gate and up in 16 bits, transposed codes of the weights.

    The gradient of gate and up lies next to them and to the gradient of the gated values, which is a layer's peak. With
    parts of the rows, that is one part's, and what is saved of a part is freed behind it; gradients of weights are
    then summed part by part in their dtype.
    """

    @staticmethod
    def forward(
        ctx, y, q, scale, q_t, scale_t, gate_up, down, residual, act, save_weight, save_input, parts, norm, up_codes,
        down_codes,
    ):  # fmt: skip
        ctx.set_materialize_grads(False)
        keep, layout = not save_weight, "row" if save_input else "both"
        ctx.owns_codes = down_codes is None
        up_codes, down_codes = _weight_codes(gate_up, up_codes, keep), _weight_codes(down, down_codes, keep)
        up_rows, down_rows = rows_of(*up_codes[:2], "block"), rows_of(*down_codes[:2], "block")
        ctx.cuts = _cut(q.shape[0], parts)
        whole = None if len(ctx.cuts) == 1 else q.new_empty(q.shape[0], down.shape[0], dtype=y.dtype)
        flat = None if residual is None else residual.reshape(-1, down.shape[0])
        saved: list[Tensor | None] = []
        for part in ctx.cuts:
            hidden = _product(rows_of(q[part], scale[:, part], "group"), up_rows, y.dtype)
            g_q, g_scale, *gated = glu_fp8.FORWARD(hidden, None, None, None, act, layout, False, "column", False)
            add, out = None if flat is None else flat[part], None if whole is None else whole[part]
            out = _product(rows_of(g_q, g_scale, "group"), down_rows, y.dtype, add=add, out=out)
            saved += (hidden, None, None) if save_input else (hidden, *gated)
        ctx.save_for_backward(
            *((q_t, scale_t) if norm is None or not save_input else (norm.x, norm.weight)),
            *((up_codes[2], up_codes[1], down_codes[2], down_codes[1]) if keep else (gate_up, None, down, None)),
            *saved,
        )
        ctx.norm = None if norm is None or not save_input else norm[2:]
        ctx.act, ctx.keep, ctx.save_input, ctx.shape = act, keep, save_input, y.shape
        ctx.dtypes, ctx.sizes = (gate_up.dtype, down.dtype), (gate_up.shape, down.shape)
        return (out if whole is None else whole).view(*y.shape[:-1], down.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 15
        q_t, scale_t, up_t, up_scale, down_t, down_scale, *saved = ctx.saved_tensors
        need_x, need_up, need_down = ctx.needs_input_grad[0], ctx.needs_input_grad[5], ctx.needs_input_grad[6]
        (rows, columns), (hidden_size, inner) = ctx.sizes
        dx = dup = ddown = None
        flat = dout.reshape(-1, hidden_size)
        if len(ctx.cuts) > 1 and need_x:
            dx = flat.new_empty(flat.shape[0], columns)
        for i, part in enumerate(ctx.cuts):
            hidden, g_q_t, g_scale_t = saved[3 * i : 3 * i + 3]
            d_q, d_scale, d_q_t, d_scale_t = OPERAND(flat[part], "group", _E4M3, False, True, need_down, 0)
            if need_down:
                if ctx.save_input:
                    made = glu_fp8.FORWARD(hidden, None, None, None, ctx.act, "transposed", False, "row", False)
                    g_q_t, g_scale_t = made[2:]
                left = columns_of(d_q_t, d_scale, d_scale_t, "group", hidden_size)
                right = columns_of(g_q_t, g_scale_t, g_scale_t, "group", inner)
                ddown = _summed(ddown, left, right, ctx.dtypes[1])
                free(g_q_t)
            if not (need_x or need_up):
                continue
            if not ctx.keep and i == 0:
                _, down_scale, down_t, _ = OPERAND(down_t, "block", _E4M3, False, False, True, 0)
            left, right = rows_of(d_q, d_scale, "group"), columns_of(down_t, down_scale, down_scale, "block", inner)
            dy = _product(left, right, dout.dtype)
            del d_q, d_scale, d_q_t, d_scale_t, left, right
            if part is ctx.cuts[-1]:
                if ctx.owns_codes and ctx.keep:
                    free(down_t)
                down_t = None
            d_q, d_scale, d_q_t, d_scale_t, _, _ = glu_fp8.BACKWARD(
                dy, hidden, None, None, None, ctx.act, "both", False, "column", False, "fp8", False
            )
            del dy
            free(hidden)
            if need_x:
                if not ctx.keep and i == 0:
                    _, up_scale, up_t, _ = OPERAND(up_t, "block", _E4M3, False, False, True, 0)
                left, right = rows_of(d_q, d_scale, "group"), columns_of(up_t, up_scale, up_scale, "block", columns)
                made = _product(left, right, dout.dtype, out=None if dx is None else dx[part])
                dx = made if dx is None else dx
            if need_up:
                if ctx.norm is not None and i == 0:
                    q_t, scale_t = Norm(q_t, scale_t, *ctx.norm).transposed()
                left = columns_of(d_q_t, d_scale_t, d_scale_t, "group", rows)
                groups = slice(part.start // _SIDE, -(-part.stop // _SIDE))
                scales = scale_t.view(-1, q_t.shape[0])[groups]
                right = columns_of(q_t[:, part], scales, scales, "group", columns)
                dup = _summed(dup, left, right, ctx.dtypes[0])
            del d_q, d_scale, d_q_t, d_scale_t, left, right
        dx = dx.view(ctx.shape) if need_x else None
        return dx, *(None,) * 4, dup, ddown, dout if ctx.needs_input_grad[7] else None, *(None,) * 7
