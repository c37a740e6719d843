"""The operator of ``norm_modulated``, beside its backward's (``norm_modulated_bwd``)."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.checks import check_inputs
from rtkernels.ops.norm.norm_modulated_plan import plan
from rtkernels.ops.shared.row_operands import check_rows
from rtkernels.ops.shared.row_quant import KINDS, check_results, quantize_reference
from rtkernels.runtime.layout import check_same, row_count, token
from rtkernels.runtime.operator.declared import Argument, Dense, InPlaceExact, Meta, Operator, Rows


def _check(
    x: Meta, residual: Meta | None, gate: Meta | None, bias: Meta | None, weight: Meta | None, norm_bias: Meta | None,
    scale: Meta | None, shift: Meta | None, channel_scale: Meta | None, quant_scale: Meta | None, out: Meta,
    residual_out: Meta | None, kept: Meta | None, scale_out: Meta | None, global_out: Meta | None, quant: str,
    swizzled: bool, static: float,
) -> None:  # fmt: skip
    check_inputs(x, weight, None, residual)
    rows, cols = row_count(x.shape), x.shape[-1]
    for name, meta in (("bias", bias), ("channel_scale", channel_scale), ("bias of the norm", norm_bias)):
        if meta is not None:
            token(name, meta.dtype, (x.dtype, torch.float32))
            check_same(name, tuple(meta.shape), (cols,), "shape", of="a row of x")
    for name, meta in (("gate", gate), ("scale", scale), ("shift", shift)):
        if meta is not None:
            token(name, meta.dtype, (x.dtype, torch.float32))
            check_rows(name, meta, rows, cols)
    if quant not in KINDS:
        raise ArgumentError(f"quant is {quant!r}; expected one of {', '.join(KINDS)}")
    for name, meta in (("residual_out", residual_out), ("kept", kept)):
        if meta is not None:
            check_same(name, (meta.dtype, tuple(meta.shape)), (x.dtype, tuple(x.shape)), "dtype and shape")
    given = quant_scale is not None or static != 0
    check_results(tuple(x.shape), quant, swizzled, given, out, scale_out, global_out)


def _reference(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, bias: Tensor | None, weight: Tensor | None,
    norm_bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, channel_scale: Tensor | None,
    quant_scale: Tensor | None, out: Tensor, residual_out: Tensor | None, kept: Tensor | None, scale_out: Tensor | None,
    global_out: Tensor | None, eps: float, offset: float, centred: bool, quant: str, swizzled: bool, static: float,
    floor: float,
) -> None:  # fmt: skip
    rows, cols = row_count(x.shape), x.shape[-1]

    def over(t: Tensor) -> Tensor:
        t = t.float().reshape(row_count(t.shape), cols)
        return t if t.shape[0] in (1, rows) else t.repeat_interleave(rows // t.shape[0], 0)

    h = x.float().reshape(rows, cols)
    if bias is not None:
        h = h + bias.float()
    if gate is not None:
        h = h * over(gate)
    if residual is not None:
        h = h + residual.float().reshape(rows, cols)
    h = h.to(x.dtype)
    shaped_h = h.reshape(x.shape)
    y = h.float()
    if centred:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + offset)
    if norm_bias is not None:
        y = y + norm_bias.float()
    if scale is not None:
        y = y * (1 + over(scale))
    if shift is not None:
        y = y + over(shift)
    if channel_scale is not None:
        y = y * channel_scale.float()
    y = y.reshape(x.shape)
    quantize_reference(y, quant, out, quant_scale, scale_out, global_out, swizzled, static, floor)
    if kept is not None:
        kept.copy_(y)
    if residual_out is not None:
        residual_out.copy_(shaped_h)


def _rows(name: str) -> Rows:
    return Rows(name, None, optional=True)


def _dense(name: str) -> Dense:
    return Dense(name, None, optional=True)


def _written(name: str, over: str = "") -> InPlaceExact:
    return InPlaceExact(name, None, optional=True, over=over)


FORWARD = Operator(
    "norm_modulated",
    (
        Rows("x", None), _rows("residual"), _rows("gate"), _dense("bias"), _dense("weight"), _dense("norm_bias"),
        _rows("scale"), _rows("shift"), _dense("channel_scale"), Argument("quant_scale", None, optional=True),
        InPlaceExact("out", None, over="x residual"), _written("residual_out", "x residual"), _written("kept"),
        _written("scale_out"),
        _written("global_out"),
    ),
    options="float eps, float offset, bool centred, str quant, bool swizzled, float static, float floor",
    results="", plan=plan, reference=_reference, check=_check,
)  # fmt: skip
