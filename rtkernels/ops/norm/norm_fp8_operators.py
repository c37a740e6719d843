"""The operators behind the quantised normalisations: launchers, references in plain torch, shapes for fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.norm.checks import check_inputs
from rtkernels.ops.norm.norm_fp8_plan import plan, plan_smooth
from rtkernels.ops.norm.norm_fp8_shapes import check, outputs, smooth_outputs
from rtkernels.ops.quant import reference as fp8
from rtkernels.ops.shared.fp8_layout import E4M3
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.declared import Dense, Operator, Rows

SMALLEST_SMOOTH = 1e-30


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rstd: Tensor | None,
    mean: Tensor | None, eps: float, offset: float, layout: str, pow2_scale: bool, scale_layout: str, keep: bool,
    centred: bool,
) -> list[Tensor]:  # fmt: skip
    v, statistics, total = _normalised(x, weight, bias, residual, rstd, mean, eps, offset, centred)
    results: list[Tensor] = []
    if layout in ("row", "both"):
        results += fp8.quantize(v, "group", E4M3, pow2_scale, scale_layout)
    if layout in ("transposed", "both"):
        results += fp8.quantize(v, "group_t", E4M3, pow2_scale, "row")
    return results + _more(statistics, v.to(x.dtype) if keep else None, total)


def _normalised(x, weight, bias, residual, rstd, mean, eps: float, offset: float, centred: bool):
    """Return the normalised values in fp32, the statistics that were not given, and the sum or None."""
    total = None if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    h = (x if total is None else total).float()
    count = max(x.shape[-1], 1)
    statistics: list[Tensor] = []
    if rstd is None:
        if centred:
            rough = h.sum(-1) / count
            mean = rough + (h - rough[..., None]).sum(-1) / count
        d = h - mean[..., None] if centred else h
        rstd = torch.rsqrt(d.square().sum(-1) / count + eps)
        statistics = [rstd, mean] if centred else [rstd]
    v = (h - mean[..., None]) * rstd[..., None] if centred else h * rstd[..., None]
    if weight is not None:
        v = v * (weight.float() + offset)
    if bias is not None:
        v = v + bias.float()
    return v, statistics, total


def _more(statistics: list[Tensor], *rest: Tensor | None) -> list[Tensor]:
    return [t.contiguous() for t in (*statistics, *rest) if t is not None]


def _reference_smooth(
    x: Tensor, smooth: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    offset: float, pow2_scale: bool, keep: bool, calibrate: bool, centred: bool,
) -> list[Tensor]:  # fmt: skip
    v, statistics, total = _normalised(x, weight, bias, residual, None, None, eps, offset, centred)
    q, scale = fp8.quantize(v / smooth.clamp(min=SMALLEST_SMOOTH), "row", E4M3, pow2_scale, "row")
    results = [q, scale.reshape(x.shape[:-1]), *_more(statistics, v.to(x.dtype) if keep else None, total)]
    if calibrate:
        magnitudes = torch.where(v.isfinite(), v.abs(), 0.0).reshape(row_count(x.shape), x.shape[-1])
        results.append(magnitudes.amax(0) if magnitudes.shape[0] else magnitudes.new_zeros(x.shape[-1]))
    return results


_X, _RESIDUAL = Rows("x", None), Rows("residual", None, optional=True)
_WEIGHT, _BIAS, _RSTD, _MEAN = (Dense(name, None, optional=True) for name in ("weight", "bias", "rstd", "mean"))
# Codes with a scale per 128 numbers, or none.
FORWARD = Operator(
    "norm_fp8", (_X, _WEIGHT, _BIAS, _RESIDUAL, _RSTD, _MEAN),
    options="float eps, float offset, str layout, bool pow2_scale, str scale_layout, bool keep, bool centred",
    results=None, outputs=outputs, plan=plan, reference=_reference, check=check,
)  # fmt: skip
# Codes with a scale per row, of smoothed values.
SMOOTH = Operator(
    "norm_smooth_fp8", (_X, Dense("smooth", None), _WEIGHT, _BIAS, _RESIDUAL),
    options="float eps, float offset, bool pow2_scale, bool keep, bool calibrate, bool centred", results=None,
    outputs=smooth_outputs, plan=plan_smooth, reference=_reference_smooth, check=check_inputs,
)  # fmt: skip
