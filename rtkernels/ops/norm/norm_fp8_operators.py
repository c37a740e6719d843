"""The operators behind the quantised normalisations: launchers, the same in plain torch, shapes for fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.norm.norm_fp8_plan import PLANS, SMOOTH_PLANS
from rtkernels.ops.norm.norm_fp8_shapes import (
    CODES,
    check,
    check_inputs,
    check_options,
    outputs_of,
    smooth_outputs_of,
    statistics_of,
)
from rtkernels.ops.quant import reference as fp8
from rtkernels.runtime.layout import address, metadata, rowed
from rtkernels.runtime.operator.operator import TorchOp

SMALLEST_SMOOTH = 1e-30


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


# ---- codes with a scale per 128 numbers, or none --------------------------------------------------------------------


def _launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
    eps: float,
    offset: float,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
    keep: bool,
    centred: bool,
) -> list[Tensor]:
    align = (x.data_ptr() | address(weight) | address(bias) | address(residual)) & 15
    plan = PLANS[
        (x.dtype, x.shape, x.stride(), x.get_device()),
        metadata(weight), metadata(bias), metadata(residual), metadata(rstd), metadata(mean),
        layout, pow2_scale, scale_layout, keep, centred, align,
    ]  # fmt: skip
    if plan:
        return plan.run(x, weight, bias, residual, rstd, mean, eps, offset)
    options = (eps, offset, layout, pow2_scale, scale_layout, keep, centred)
    if plan is False:
        return _reference(x, weight, bias, residual, rstd, mean, *options)
    return _launch(
        rowed(x), _dense(weight), _dense(bias), rowed(residual), _dense(rstd), _dense(mean), *options
    )  # fmt: skip


def _reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
    eps: float,
    offset: float,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
    keep: bool,
    centred: bool,
) -> list[Tensor]:
    """Do the same in plain torch."""
    tensors = map(metadata, (x, weight, bias, residual, rstd, mean))
    check(*tensors, layout, scale_layout, keep, centred)
    v, made, total = _normalised(x, weight, bias, residual, rstd, mean, eps, offset, centred)
    results: list[Tensor] = []
    if layout in ("row", "both"):
        results += fp8.quantize(v, "group", CODES, pow2_scale, scale_layout)
    if layout in ("transposed", "both"):
        results += fp8.quantize(v, "group_t", CODES, pow2_scale, "row")
    return results + _more(made, v.to(x.dtype) if keep else None, total)


def _normalised(x, weight, bias, residual, rstd, mean, eps: float, offset: float, centred: bool):
    """Return the normalised values in fp32, the statistics that were not given, and the sum or None."""
    total = None if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    h = (x if total is None else total).float()
    count = max(x.shape[-1], 1)
    made: list[Tensor] = []
    if rstd is None:
        if centred:
            rough = h.sum(-1) / count
            mean = rough + (h - rough[..., None]).sum(-1) / count
        d = h - mean[..., None] if centred else h
        rstd = torch.rsqrt(d.square().sum(-1) / count + eps)
        made = [rstd, mean] if centred else [rstd]
    v = (h - mean[..., None]) * rstd[..., None] if centred else h * rstd[..., None]
    if weight is not None:
        v = v * (weight.float() + offset)
    if bias is not None:
        v = v + bias.float()
    return v, made, total


def _more(statistics: list[Tensor], *rest: Tensor | None) -> list[Tensor]:
    return [t.contiguous() for t in (*statistics, *rest) if t is not None]


def _fake(
    x, weight, bias, residual, rstd, mean, eps, offset, layout, pow2_scale, scale_layout, keep, centred
):  # fmt: skip
    check_options(layout, scale_layout)
    computed = statistics_of(centred) if rstd is None else ()
    wanted = outputs_of(x.shape, x.dtype, layout, scale_layout, computed, keep, residual is not None)
    return [x.new_empty(shape, dtype=dtype) for _, shape, dtype in wanted]


FORWARD = TorchOp(
    "norm_fp8(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? rstd, Tensor? mean, float eps, "
    "float offset, str layout, bool pow2_scale, str scale_layout, bool keep, bool centred) -> Tensor[]",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)


# ---- codes with a scale per row, of smoothed values -----------------------------------------------------------------


def _launch_smooth(
    x: Tensor,
    smooth: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    pow2_scale: bool,
    keep: bool,
    calibrate: bool,
    centred: bool,
) -> list[Tensor]:
    align = (x.data_ptr() | smooth.data_ptr() | address(weight) | address(bias) | address(residual)) & 15
    plan = SMOOTH_PLANS[
        (x.dtype, x.shape, x.stride(), x.get_device()),
        metadata(smooth), metadata(weight), metadata(bias), metadata(residual),
        pow2_scale, keep, calibrate, centred, align,
    ]  # fmt: skip
    if plan:
        return plan.run(x, smooth, weight, bias, residual, eps, offset)
    options = (eps, offset, pow2_scale, keep, calibrate, centred)
    if plan is False:
        return _reference_smooth(x, smooth, weight, bias, residual, *options)
    return _launch_smooth(rowed(x), _dense(smooth), _dense(weight), _dense(bias), rowed(residual), *options)


def _reference_smooth(
    x: Tensor,
    smooth: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    pow2_scale: bool,
    keep: bool,
    calibrate: bool,
    centred: bool,
) -> list[Tensor]:
    check_inputs(*map(metadata, (x, weight, bias, residual)), smooth=metadata(smooth))
    v, made, total = _normalised(x, weight, bias, residual, None, None, eps, offset, centred)
    q, scale = fp8.quantize(v / smooth.clamp(min=SMALLEST_SMOOTH), "row", CODES, pow2_scale, "row")
    results = [q, scale.reshape(x.shape[:-1]), *_more(made, v.to(x.dtype) if keep else None, total)]
    if calibrate:
        most = torch.where(v.isfinite(), v.abs(), 0.0).reshape(-1, x.shape[-1])
        results.append(most.amax(0) if most.shape[0] else most.new_zeros(x.shape[-1]))
    return results


def _fake_smooth(x, smooth, weight, bias, residual, eps, offset, pow2_scale, keep, calibrate, centred):
    wanted = smooth_outputs_of(x.shape, x.dtype, keep, residual is not None, calibrate, centred)
    return [x.new_empty(shape, dtype=dtype) for _, shape, dtype in wanted]


SMOOTH = TorchOp(
    "norm_smooth_fp8(Tensor x, Tensor smooth, Tensor? weight, Tensor? bias, Tensor? residual, float eps, float offset, "
    "bool pow2_scale, bool keep, bool calibrate, bool centred) -> Tensor[]",
    launch=_launch_smooth,
    reference=_reference_smooth,
    fake=_fake_smooth,
)
