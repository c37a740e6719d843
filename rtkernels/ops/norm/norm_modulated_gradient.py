"""The backward of ``norm_modulated``: the plain normalisation's, between products with the operands around it.

With ``h = residual + gate * (x + bias)``, ``a`` the plain normalisation of h and ``y = (a * (1 + scale) + shift) *
channel_scale``: gradients of a go through the backward of ``rms_norm`` or ``layer_norm``, those of the operands are
products with what they were multiplied with. Where no gradient of weights is wanted, all that belongs to one row is one
launch (``norm_modulated_bwd``). Sums over rows are in fp32, in an order that shapes alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.act.combine import combine
from rtkernels.ops.norm.norm_modulated_bwd import BACKWARD
from rtkernels.ops.norm.norm_modulated_operators import FORWARD
from rtkernels.ops.norm.statistics import backward as norm_backward
from rtkernels.ops.shared.row_operands import summed
from rtkernels.runtime.layout import as_rows, row_count
from rtkernels.runtime.operator.autograd import applied, constant, detached, once_differentiable
from rtkernels.runtime.torch_private import is_dynamo_compiling

_NAMES = "x", "residual", "gate", "bias", "weight", "norm_bias", "scale", "shift", "channel_scale"


def _new(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


class _Operands(NamedTuple):
    """What comes to x, in the order of the operator."""

    residual: Tensor | None = None
    gate: Tensor | None = None
    bias: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    channel_scale: Tensor | None = None

    @property
    def change_x(self) -> bool:
        """Whether something else than x is normalised."""
        return any(t is not None for t in (self.residual, self.gate, self.bias))


def _run(x: Tensor, operands: _Operands, eps: float, offset: float, centred: bool) -> tuple[Tensor, Tensor]:
    x, *others = detached(x, *operands)
    y = _new(x)
    h = _new(x) if operands.change_x else x
    residual_out = h if operands.change_x else None
    FORWARD(x, *others, None, y, residual_out, None, None, None, eps, offset, centred, "none", False, 0.0, 0.0)
    return y, h


def _to_rows(grad: Tensor, like: Tensor) -> Tensor:
    """Return a gradient of x's shape summed to the rows of an operand, each for as many neighbouring ones."""
    count = row_count(like.shape)
    if not grad.numel():
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    parts = grad.reshape(count, -1, grad.shape[-1])
    return summed(parts, like.reshape(count, 1, -1)).reshape(like.shape)


def _in_one_launch(
    wanted: dict[str, bool], found: dict[str, Tensor | None], dy: Tensor, dsum: Tensor | None, x: Tensor | None,
    h: Tensor, gate: Tensor | None, bias: Tensor | None, weight: Tensor | None, norm_bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, channel_scale: Tensor | None, numbers: tuple[float, float, bool],
) -> None:  # fmt: skip
    """Compute all needed gradients except those of weights: one launch, and sums for operands with fewer rows."""

    def memory(needed: bool) -> Tensor | None:
        return torch.empty(h.shape, dtype=h.dtype, device=h.device) if needed else None

    through_gate = gate is not None and (wanted["x"] or wanted["bias"])
    dh = memory(wanted["residual"] or (gate is None and (wanted["x"] or wanted["bias"])))
    dscale, dgate = memory(wanted["scale"]), memory(wanted["gate"])
    dshift = memory(wanted["shift"] and channel_scale is not None)
    dx = memory(through_gate)
    own_x = x if wanted["gate"] else None
    BACKWARD(dy, h, dsum, own_x, gate, bias, weight, norm_bias, scale, channel_scale, dh, dscale, dshift, dx, dgate,
             *numbers)  # fmt: skip
    found["residual"], found["x"] = dh, dx if through_gate else dh
    if wanted["bias"]:
        found["bias"] = summed(as_rows(found["x"]), bias)
    if wanted["gate"]:
        found["gate"] = _to_rows(dgate, gate)
    if wanted["scale"]:
        found["scale"] = _to_rows(dscale, scale)
    if wanted["shift"]:
        found["shift"] = _to_rows(dy if dshift is None else dshift, shift)


class _Modulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, gate, bias, weight, norm_bias, scale, shift, channel_scale, eps, offset, centred):
        ctx.set_materialize_grads(False)
        ctx.numbers = eps, offset, centred
        operands = _Operands(residual, gate, bias, weight, norm_bias, scale, shift, channel_scale)
        y, h = _run(x, operands, eps, offset, centred)
        ctx.changed = operands.change_x
        saved = x if gate is not None or not ctx.changed else None
        ctx.save_for_backward(saved, h if ctx.changed else None, gate, bias, weight, norm_bias, scale, shift,
                              channel_scale)  # fmt: skip
        if not ctx.changed:
            h = x.new_empty(0)
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum):
        x, h, gate, bias, weight, norm_bias, scale, shift, channel_scale = ctx.saved_tensors
        eps, offset, centred = ctx.numbers
        h = x if h is None else h
        dsum = dsum if ctx.changed else None
        wanted = dict(zip(_NAMES, ctx.needs_input_grad, strict=False))
        found: dict[str, Tensor | None] = dict.fromkeys(wanted)
        if dy is not None and wanted["channel_scale"]:
            y, _ = _run(h, _Operands(None, None, None, weight, norm_bias, scale, shift), eps, offset, centred)
            found["channel_scale"] = summed(as_rows(combine(y, _new(y), mul0=dy)), channel_scale)
        if dy is not None and not (wanted["weight"] or wanted["norm_bias"]):
            _in_one_launch(wanted, found, dy, dsum, x, h, gate, bias, weight, norm_bias, scale, shift, channel_scale,
                           ctx.numbers)  # fmt: skip
            return (*(found[name] if need else None for name, need in wanted.items()), None, None, None)
        dh = dsum
        if dy is not None:
            factors = None if channel_scale is None else channel_scale.reshape(1, -1)
            if wanted["scale"]:
                a, _ = _run(h, _Operands(weight=weight, norm_bias=norm_bias), eps, offset, centred)
                found["scale"] = _to_rows(combine(a, _new(a), mul0=dy, mul1=factors), scale)
            if wanted["shift"]:
                found["shift"] = _to_rows(dy if factors is None else combine(dy, _new(h), mul0=factors), shift)
            da = dy
            if scale is not None or channel_scale is not None:
                # dy + scale * dy, each times channel_scale
                base = combine(dy, _new(h), mul0=factors) if factors is not None else dy
                da = base if scale is None else combine(base, _new(h), mul0=scale, base0=base)
            dh, found["weight"], found["norm_bias"] = norm_backward(
                centred, da, h, weight, norm_bias, dsum, eps, offset, wanted["weight"], wanted["norm_bias"]
            )
        if dh is not None:
            found["residual"] = dh
            if wanted["x"] or wanted["bias"]:
                found["x"] = dh if gate is None else combine(dh, _new(h), mul0=gate)
            if wanted["bias"]:
                found["bias"] = summed(as_rows(found["x"]), bias)
            if wanted["gate"]:
                added = None if bias is None else bias.reshape(1, -1)
                found["gate"] = _to_rows(combine(x, _new(h), add0=added, mul0=dh), gate)
        return (*(found[name] if need else None for name, need in wanted.items()), None, None, None)


_apply = applied(_Modulated)


def differentiable(tensors: Sequence[Tensor | None], eps: float, offset: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Return y and h (empty unless h is another tensor than x) of a normalisation that autograd records.

    Args:
        tensors: x, residual, gate, bias, weight, norm_bias, scale, shift and channel_scale.
        eps: As the operator has it.
        offset: Likewise.
        centred: It is a layer norm.
    """
    if is_dynamo_compiling():
        eps, offset = constant(eps), constant(offset)
    return _apply(*tensors, eps, offset, centred)
