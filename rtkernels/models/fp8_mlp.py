"""A gated MLP in fp8 as one autograd node: the gradient of gate and up exists only as codes.

With separate nodes, the activation's gradient would be written in 16 bits and read again to be quantised, and it is the
largest tensor of a decoder layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import rtkernels
from rtkernels.models import fp8_products as products
from rtkernels.models.fp8_products import WEIGHT_GRADIENT
from rtkernels.models.reuse import free, is_kept
from rtkernels.ops.act import glu_fp8
from rtkernels.runtime.layout import in_shape
from rtkernels.runtime.operator.autograd import applied, once_differentiable

_SIDE = 128  # rows that share a scale
_WORD = torch.int64  # codes are copied as 8-byte words
_glu, _glu_gradient = glu_fp8.FORWARD.call, glu_fp8.BACKWARD.call


def _cut(rows: int, parts: int) -> list[slice]:
    """Split rows into parts that begin at multiples of 128, the number of rows that share a scale."""
    step = -(-rows // (_SIDE * parts)) * _SIDE
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class Norm(NamedTuple):
    """The norm that quantised x: its input and weight, which its own gradient needs as well, and its options."""

    x: Tensor
    weight: Tensor
    eps: float
    offset: float

    def transposed(self) -> tuple[Tensor, Tensor]:
        """Recompute and return the transposed codes and their scales."""
        codes = rtkernels.rms_norm_fp8(self.x, self.weight, eps=self.eps, offset=self.offset, layout="transposed")
        return codes.q_t, codes.scale_t


class Saving(NamedTuple):
    """What is saved instead of codes, and the number of parts of the backward pass; see ``Recipe``."""

    weight: bool
    input: bool
    parts: int


def _codes_within(t: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a matrix of codes in the memory of a 16-bit matrix."""
    return t.view(-1).view(products.E4M3)[: shape[0] * shape[1]].view(shape)


def _in_parts(
    cuts: list[slice], d_q: Tensor, d_scale: Tensor, down_t: Tensor, down_scale: Tensor, hidden: Tensor, act: str,
    up_t: Tensor | None, up_scale: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor | None, list[Tensor], Tensor]:  # fmt: skip
    """Return the gradient of x (None without `up_t`), and the transposed codes of the gate and up gradient with scales.

    Each part of the rows goes all the way from the gradient of the result, `d_q`, to that of x before the next part
    starts. So the gradient of the gated values and the codes by rows exist for one part only. The transposed codes
    overwrite gate and up (`hidden`) of the previous part unless the graph is retained. All codes are bitwise equal to
    those of one part.
    """
    (rows, columns), longest, keeps = hidden.shape, cuts[0].stop, is_kept()
    gated = hidden.new_empty(longest, columns // 2, dtype=dtype)
    by_rows = hidden.new_empty(longest * columns, dtype=products.E4M3)
    scale_t = hidden.new_empty(-(-rows // _SIDE), columns, dtype=torch.float32)
    dx = None if up_t is None else hidden.new_empty(rows, up_t.shape[0], dtype=dtype)
    transposed: list[Tensor] = []
    for i, part in enumerate(cuts):
        count = part.stop - part.start
        dy = products.multiply(None, d_q[part], down_t, d_scale[part], down_scale, dtype, out=gated[:count])
        if i == 0 or keeps:
            q_t = hidden.new_empty(columns, count, dtype=products.E4M3)
        else:
            q_t = _codes_within(hidden[cuts[i - 1]], (columns, count))
        q = by_rows[: count * columns].view(count, columns)
        codes = rtkernels.glu_fp8_backward(
            dy, hidden[part], act=act, scale_layout="column",
            out=(q, None, q_t, scale_t[part.start // _SIDE : -(-part.stop // _SIDE)], None, None),
        )  # fmt: skip
        transposed.append(q_t)
        if dx is not None:
            products.multiply(None, q, up_t, codes.scale.t(), up_scale, dtype, out=dx[part])
    return dx, transposed, scale_t


class _GatedMlp(torch.autograd.Function):
    """``down @ (act(gate) * up) + residual`` from codes of x.

    Arguments: y, which stands for x in the graph and gets its gradient; the residual or None; the weights; the codes of
        x in
    a list, which is emptied so that the codes by rows are freed after the first product; gate and up as one matrix
    ``[2 * inner, hidden]``; codes of that matrix and of down, or None; the activation; what to save; the norm that
    computed the codes, or None. Saved: transposed codes of x and of the gated values, gate and up in 16 bits (to
    recompute codes of the gated values), and transposed codes of the weights.

    At a layer's peak, gate and up, their gradient, and the gradient of the gated values exist at the same time;
    :func:`_in_parts` lowers this peak with bitwise equal results.
    """

    @staticmethod
    def forward(ctx, y, residual, gate, up, down, codes, gate_up, up_codes, down_codes, act, saving, norm):
        ctx.set_materialize_grads(False)
        ctx.owns_codes, keep = up_codes is None and down_codes is None, not saving.weight
        hidden_size = down.shape[0]
        ctx.sites = up_at, down_at = products.sites_of(gate_up.shape), products.sites_of(down.shape)
        up_codes, x = up_codes or up_at.weight_codes(gate_up, keep), codes.pop()
        hidden = products.multiply(
            up_at.product, x.q.view(-1, x.q.shape[-1]), up_codes.q, x.scale.t(), up_codes.scale, y.dtype
        )
        ctx.norm = None if norm is None or not saving.input else norm[2:]
        read = (x.q_t, x.scale_t) if ctx.norm is None else norm[:2]
        weights = (up_codes.q_t, up_codes.scale) if keep else (gate_up, None)
        del up_codes, x  # frees codes by rows before the peak of the forward pass below
        layout = "row" if saving.input else "both"
        g_q, g_scale, *gated = _glu(hidden, None, None, None, act, layout, False, "column", False)
        flat = None if residual is None else residual.reshape(-1, hidden_size)
        down_codes = down_codes or down_at.weight_codes(down, keep)
        out = products.multiply(down_at.product, g_q, down_codes.q, g_scale.t(), down_codes.scale, y.dtype, add=flat)
        weights += (down_codes.q_t, down_codes.scale) if keep else (down, None)
        ctx.save_for_backward(*read, *weights, hidden, *((None, None) if saving.input else gated))
        ctx.act, ctx.saving, ctx.shape, ctx.dtypes = act, saving, y.shape, (gate_up.dtype, down.dtype)
        return in_shape(out, *y.shape[:-1], hidden_size)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 12
        q_t, scale_t, up_t, up_scale, down_t, down_scale, hidden, g_q_t, g_scale_t = ctx.saved_tensors
        need_x, need_residual, need_gate, need_up, need_down, *_ = ctx.needs_input_grad
        (up_at, down_at), keep = ctx.sites, not ctx.saving.weight
        need_up = need_gate or need_up
        dx = dup = ddown = None
        d_q, d_scale, d_q_t, d_scale_t = products.quantized(down_at.incoming, dout.reshape(-1, dout.shape[-1]))
        if need_down:
            if ctx.saving.input:
                g_q_t, g_scale_t = _glu(hidden, None, None, None, ctx.act, "transposed", False, "row", False)[2:]
            g_scale_t = g_scale_t.view(-1, g_q_t.shape[0]).t()
            ddown = products.multiply(
                down_at.dw, d_q_t, g_q_t, d_scale_t.t(), g_scale_t, ctx.dtypes[1], WEIGHT_GRADIENT
            )
            free(g_q_t)
        if need_x or need_up:
            if not keep:
                down_scale, down_t = down_at.weight_codes(down_t, True)[1:]
            cuts = _cut(hidden.shape[0], ctx.saving.parts)
            if len(cuts) == 1:
                dy = products.multiply(down_at.dx, d_q, down_t, d_scale.t(), down_scale.t(), dout.dtype)
                del d_q, d_scale, d_q_t, d_scale_t
                if ctx.owns_codes and keep:
                    free(down_t)
                down_t = None
                d_q, d_scale, d_q_t, d_scale_t, _, _ = _glu_gradient(
                    dy, hidden, None, None, None, ctx.act, "both", False, "column", False, "fp8", False
                )
                del dy
                free(hidden)
            if need_x and not keep:
                up_scale, up_t = up_at.weight_codes(up_t, True)[1:]
            if len(cuts) > 1:
                del d_q_t, d_scale_t
                up = (up_t, up_scale.t()) if need_x else (None, None)
                dx, parts, d_scale_t = _in_parts(
                    cuts, d_q, d_scale.t(), down_t, down_scale.t(), hidden, ctx.act, *up, dout.dtype
                )
                del up
                if ctx.owns_codes and keep:
                    free(down_t)
            elif need_x:
                dx = products.multiply(up_at.dx, d_q, up_t, d_scale.t(), up_scale.t(), dout.dtype)
            del d_q, d_scale
            if ctx.owns_codes and keep:
                free(up_t)
            down_t = up_t = None
            if len(cuts) > 1 and need_up:
                d_q_t = torch.cat([t.view(_WORD) for t in parts], 1).view(products.E4M3)
                del parts
                free(hidden)
            if need_up:
                if ctx.norm is not None:
                    q_t, scale_t = Norm(q_t, scale_t, *ctx.norm).transposed()
                scale_t, d_scale_t = scale_t.view(-1, q_t.shape[0]), d_scale_t.view(-1, d_q_t.shape[0])
                dup = products.multiply(
                    up_at.dw, d_q_t, q_t, d_scale_t.t(), scale_t.t(), ctx.dtypes[0], WEIGHT_GRADIENT
                )
        dgate, dup = (None, None) if dup is None else dup.chunk(2)
        dx = None if dx is None else dx.view(ctx.shape)
        return dx, dout if need_residual else None, dgate, dup, ddown, *(None,) * 7


gated_mlp = applied(_GatedMlp)


def gated_mlp_alone(
    residual: Tensor | None, down: Tensor, x: Any, gate_up: Tensor, up_codes: Any, down_codes: Any, act: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the bitwise equal result of :class:`_GatedMlp` without saving anything for a gradient.

    The first forward pass of re-entrant checkpointing runs without gradients and is recomputed with them.
    """
    up_at, down_at = products.sites_of(gate_up.shape), products.sites_of(down.shape)
    up_codes = up_codes or up_at.weight_codes(gate_up, False)
    q = x.q.view(-1, x.q.shape[-1])
    hidden = products.multiply(up_at.product, q, up_codes.q, x.scale.t(), up_codes.scale, dtype)
    q, scale = _glu(hidden, None, None, None, act, "row", False, "column", False)[:2]
    flat = None if residual is None else residual.reshape(-1, down.shape[0])
    down_codes = down_codes or down_at.weight_codes(down, False)
    out = products.multiply(down_at.product, q, down_codes.q, scale.t(), down_codes.scale, dtype, add=flat)
    return out.view(*x.q.shape[:-1], down.shape[0])
