"""A gated MLP by fp8 codes as one step of the graph: the gradient of gate and up exists as codes alone.

As separate steps, the gradient of the activation is written in 16 bits and read again to be quantised, which is the
largest tensor of a decoder layer two times over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import rtkernels
from rtkernels.models import fp8_products as products
from rtkernels.models.fp8_products import WEIGHT_GRADIENT
from rtkernels.models.reuse import free
from rtkernels.ops.act import glu_fp8
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.gradient import applied

_SIDE = 128  # rows that share a scale
_glu, _glu_gradient = glu_fp8.FORWARD.call, glu_fp8.BACKWARD.call


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


class Saving(NamedTuple):
    """What is saved in place of codes, see ``Recipe``, and in how many parts rows are taken."""

    weight: bool
    input: bool
    parts: int


class _GatedMlp(torch.autograd.Function):
    """``down @ (act(gate) * up) + residual`` of codes of x.

    Arguments: y, which stands for x and gets the gradient; the residual, or None; the weights; codes of x; gate and up
    as one matrix ``[2 * inner, hidden]``; codes of that and of down, or None; the activation; what to save; the norm
    that made the codes, or None. Saved: transposed codes of x and of the gated values, gate and up in 16 bits (so that
    codes of the gated values can be made anew), transposed codes of the weights.

    The gradient of gate and up lies next to them and to the gradient of the gated values, which is a layer's peak. With
    parts of the rows, that is one part's, and what is saved of a part is freed behind it; gradients of weights are
    then summed part by part in their dtype.
    """

    @staticmethod
    def forward(ctx, y, residual, gate, up, down, x, gate_up, up_codes, down_codes, act, saving, norm):
        ctx.set_materialize_grads(False)
        ctx.owns_codes, keep, (hidden_size, inner) = down_codes is None, not saving.weight, down.shape
        ctx.sites = up_at, down_at = products.sites_of(gate_up.shape), products.sites_of(down.shape)
        up_codes = up_codes or up_at.weight_codes(gate_up, keep)
        down_codes = down_codes or down_at.weight_codes(down, keep)
        q, scale = x.q if x.q.dim() == 2 else x.q.view(-1, x.q.shape[-1]), x.scale.t()
        flat = None if residual is None else residual.reshape(-1, hidden_size)
        layout = "row" if saving.input else "both"
        ctx.cuts = _cut(q.shape[0], saving.parts) if saving.parts > 1 else [slice(0, q.shape[0])]
        whole = None if len(ctx.cuts) == 1 else q.new_empty(q.shape[0], hidden_size, dtype=y.dtype)
        saved: list[Tensor | None] = []
        for part in ctx.cuts:
            rows = (q, scale, flat, None)
            if whole is not None:
                rows = q[part], scale[part], None if flat is None else flat[part], whole[part]
            hidden = products.multiply(up_at.product, rows[0], up_codes.q, rows[1], up_codes.scale, y.dtype)
            g_q, g_scale, *gated = _glu(hidden, None, None, None, act, layout, False, "column", False)
            out = products.multiply(
                down_at.product, g_q, down_codes.q, g_scale.t(), down_codes.scale, y.dtype, add=rows[2], out=rows[3]
            )
            saved += (hidden, None, None) if saving.input else (hidden, *gated)
        ctx.norm = None if norm is None or not saving.input else norm[2:]
        weights = gate_up, None, down, None
        if keep:
            weights = up_codes.q_t, up_codes.scale, down_codes.q_t, down_codes.scale
        ctx.save_for_backward(*((x.q_t, x.scale_t) if ctx.norm is None else norm[:2]), *weights, *saved)
        ctx.act, ctx.saving, ctx.shape, ctx.sizes = act, saving, y.shape, (gate_up.shape[0], hidden_size, inner)
        ctx.dtypes = gate_up.dtype, down.dtype
        return (out if whole is None else whole).view(*y.shape[:-1], hidden_size)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 12
        q_t, scale_t, up_t, up_scale, down_t, down_scale, *saved = ctx.saved_tensors
        need_x, need_residual, need_gate, need_up, need_down, *_ = ctx.needs_input_grad
        (rows, hidden_size, inner), (up_at, down_at), keep = ctx.sizes, ctx.sites, not ctx.saving.weight
        need_up = need_gate or need_up
        dx = dup = ddown = None
        flat, whole = dout.reshape(-1, hidden_size), len(ctx.cuts) == 1
        if not whole and need_x:
            dx = flat.new_empty(flat.shape[0], ctx.shape[-1])
        for i, part in enumerate(ctx.cuts):
            hidden, g_q_t, g_scale_t = saved[3 * i : 3 * i + 3]
            d_q, d_scale, d_q_t, d_scale_t = products.quantized(down_at.incoming, flat if whole else flat[part])
            if need_down:
                if ctx.saving.input:
                    made = _glu(hidden, None, None, None, ctx.act, "transposed", False, "row", False)
                    g_q_t, g_scale_t = made[2:]
                ddown = products.multiply(
                    down_at.dw, d_q_t, g_q_t, d_scale_t.t(), g_scale_t.view(-1, inner).t(), ctx.dtypes[1],
                    WEIGHT_GRADIENT, out=ddown, accumulate=ddown is not None,
                )  # fmt: skip
                free(g_q_t)
            if not (need_x or need_up):
                continue
            if not keep and i == 0:
                down_scale, down_t = down_at.weight_codes(down_t, True)[1:]
            dy = products.multiply(down_at.dx, d_q, down_t, d_scale.t(), down_scale.t(), dout.dtype)
            del d_q, d_scale, d_q_t, d_scale_t
            if part is ctx.cuts[-1]:
                if ctx.owns_codes and keep:
                    free(down_t)
                down_t = None
            d_q, d_scale, d_q_t, d_scale_t, _, _ = _glu_gradient(
                dy, hidden, None, None, None, ctx.act, "both", False, "column", False, "fp8", False
            )
            del dy
            free(hidden)
            if need_x:
                if not keep and i == 0:
                    up_scale, up_t = up_at.weight_codes(up_t, True)[1:]
                out = None if whole else dx[part]
                made = products.multiply(up_at.dx, d_q, up_t, d_scale.t(), up_scale.t(), dout.dtype, out=out)
                dx = made if whole else dx
            if need_up:
                if ctx.norm is not None and i == 0:
                    q_t, scale_t = Norm(q_t, scale_t, *ctx.norm).transposed()
                x_q_t, x_scale_t = q_t, scale_t.view(-1, q_t.shape[0])
                if not whole:
                    x_q_t, x_scale_t = q_t[:, part], x_scale_t[part.start // _SIDE : -(-part.stop // _SIDE)]
                dup = products.multiply(
                    up_at.dw, d_q_t, x_q_t, d_scale_t.view(-1, rows).t(), x_scale_t.t(), ctx.dtypes[0], WEIGHT_GRADIENT,
                    out=dup, accumulate=dup is not None,
                )  # fmt: skip
            del d_q, d_scale, d_q_t, d_scale_t
        dgate, dup = (None, None) if dup is None else dup.chunk(2)
        dx = dx.view(ctx.shape) if need_x else None
        return dx, dout if need_residual else None, dgate, dup, ddown, *(None,) * 7


gated_mlp = applied(_GatedMlp)
