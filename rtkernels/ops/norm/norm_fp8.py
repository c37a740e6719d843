"""RMS and layer normalisation whose results leave as fp8 codes and scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.norm_fp8_operators import FORWARD, SMOOTH
from rtkernels.ops.norm.norm_fp8_plan import KERNELS
from rtkernels.ops.norm.norm_fp8_shapes import check_options, statistics_of
from rtkernels.ops.norm.statistics import backward
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op


class NormFp8(NamedTuple):
    """Codes, scales and statistics of a normalised tensor ``[..., n]``; None if not requested.

    With ``[m, n]`` for x whose leading dimensions are flattened:

    Attributes:
        q: float8_e4m3fn, of x's shape. Layouts "row" and "both".
        scale: float32, one per 128 columns of a row: x's shape with ``ceil(n/128)`` as last dimension, or
            ``[ceil(n/128), m]`` for scale_layout "column". With ``smooth`` one per row: x's shape without the last
            dimension.
        q_t: float8_e4m3fn ``[n, m]``. Layouts "transposed" and "both".
        scale_t: float32 ``[ceil(m/128), n]``, one per 128 rows of a column.
        rstd: float32, x's shape without the last dimension: ``1 / sqrt(mean(h^2) + eps)``, for layer_norm_fp8 with the
            variance of h. None if it was given.
        y: The normalised values in x's dtype with ``keep``. Otherwise, where a gradient is wanted, a tensor of that
            shape and dtype without values (one NaN, expanded): what takes its gradient. Otherwise None.
        sum: ``x + residual`` in x's dtype, with a residual.
        mean: float32, shaped as rstd: the mean of h, for layer_norm_fp8. None if it was given.
        amax: float32 ``[n]``: the largest finite magnitude of every column of the normalised values, with
            ``calibrate``.
    """

    q: Tensor | None = None
    scale: Tensor | None = None
    q_t: Tensor | None = None
    scale_t: Tensor | None = None
    rstd: Tensor | None = None
    y: Tensor | None = None
    sum: Tensor | None = None
    mean: Tensor | None = None
    amax: Tensor | None = None


class _Options(NamedTuple):
    """Everything about a call that is not a tensor."""

    eps: float
    offset: float
    layout: str
    pow2_scale: bool
    scale_layout: str
    keep: bool
    calibrate: bool
    centred: bool


def _names(layout: str, given: bool, keep: bool, residual: bool, calibrate: bool, centred: bool) -> tuple[str, ...]:
    """Return the fields that the results of an operator are, in order."""
    names = ("q", "scale") * (layout in ("row", "both")) + ("q_t", "scale_t") * (layout in ("transposed", "both"))
    names += () if given else statistics_of(centred)
    return names + ("y",) * keep + ("sum",) * residual + ("amax",) * calibrate


def _run(x, weight, bias, residual, smooth, rstd, mean, options: _Options) -> dict[str, Tensor]:
    eps, offset, layout, pow2_scale, scale_layout, keep, calibrate, centred = options
    if smooth is None:
        results = FORWARD.call(
            x, weight, bias, residual, rstd, mean, eps, offset, layout, pow2_scale, scale_layout, keep, centred
        )
    else:
        results = SMOOTH.call(x, smooth, weight, bias, residual, eps, offset, pow2_scale, keep, calibrate, centred)
    names = _names(layout, rstd is not None, keep, residual is not None, calibrate, centred)
    return dict(zip(names, results, strict=True))


class _NormFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, smooth, *options):
        ctx.set_materialize_grads(False)
        ctx.options = options = _Options(*options)
        results = _run(x, weight, bias, residual, smooth, None, None, options)
        y = results.pop("y", None)
        if y is None:
            y = x.new_full((), float("nan")).expand(x.shape)
        total = results.pop("sum", None)
        ctx.mark_non_differentiable(*results.values())
        if total is None:
            ctx.save_for_backward(x, weight, bias)
            return *results.values(), y
        ctx.save_for_backward(total, weight, bias)
        return *results.values(), y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # Codes, scales, statistics and maxima come first and have none.
        rest = (None,) * (1 + len(_Options._fields))
        want_weight, want_bias, want_residual = ctx.needs_input_grad[1:4]
        has_residual = len(grads) > _plain_count(ctx.options)
        dy, dsum = grads[-2:] if has_residual else (grads[-1], None)
        if dy is None:
            return dsum, None, None, dsum, *rest
        h, weight, bias = ctx.saved_tensors
        dh, *parameters = backward(
            ctx.options.centred, dy, h, weight, bias, dsum, ctx.options.eps, ctx.options.offset, want_weight, want_bias
        )
        return dh, *parameters, dh if want_residual else None, *rest


_differentiable = applied(_NormFp8)


def _plain_count(options: _Options) -> int:
    """Return how many results a differentiable call without residual has."""
    return len(_names(options.layout, False, True, False, options.calibrate, options.centred))


def _norm_fp8(x, weight, bias, residual, smooth, rstd, mean, options: _Options) -> NormFp8:
    if smooth is None:
        if options.calibrate:
            raise ArgumentError("calibrate requires smooth: it is for computing the next smoothing vector")
    else:
        if options.layout != "row" or options.scale_layout != "row" or rstd is not None or mean is not None:
            raise ArgumentError("smooth requires layout 'row' and scale_layout 'row', and excludes given statistics")
    if options.layout == "none":
        check_options("", options.scale_layout)
    if is_grad_enabled() and (needs_grad(x, weight, bias) or needs_grad(x, residual)) and rstd is None:
        results = _differentiable(x, weight, bias, residual, smooth, *options)
        names = _names(options.layout, False, False, False, options.calibrate, options.centred)
        return NormFp8(**dict(zip((*names, "y", "sum"), results, strict=False)))
    if rstd is not None and is_grad_enabled():
        x, weight, bias, rstd, mean = detached(x, weight, bias, rstd, mean)
    return NormFp8(**_run(x, weight, bias, residual, smooth, rstd, mean, options))


@public(defaults={"eps": 1e-6})
def rms_norm_fp8(
    x: Tensor, weight: Tensor | None = None, *, eps: float | None = None, offset: float = 0,
    residual: Tensor | None = None, layout: str = "row", pow2_scale: bool = False, scale_layout: str = "row",
    rstd: Tensor | None = None, keep: bool = False, smooth: Tensor | None = None, calibrate: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> NormFp8:  # fmt: skip
    """Normalise the last dimension by its root mean square and quantise the result to fp8 (e4m3).

    ``v = h / sqrt(mean(h^2) + eps) * (offset + weight)`` with ``h = x``, or ``h = x + residual`` rounded to the dtype
    of x. v is fp32 and is quantised as by :func:`rtkernels.quantize_fp8` with granularity "group" (codes of x's shape)
    and "group_t" (transposed codes): ``scale = max(amax / 448, 1e-30)``, ``q = fp8(v * (1 / scale))``.

    **Gradients.** Codes, scales, statistics and maxima are not differentiable. The result's ``y`` and ``sum`` are
    differentiable in x, weight and residual, like the results of :func:`rtkernels.rms_norm`. An ``autograd.Function``
    that multiplies the codes takes ``y`` as an additional input and returns the gradient for it. Without ``keep``, y is
    only a node of the graph: it has no memory, and its values are NaN. Only h and weight are saved for the backward
    pass.

    **Recomputing.** With ``rstd`` of an earlier call, the statistics are not computed again. This is for computing
    transposed codes (or others) in the backward pass, from x, or from the sum if there was a residual. Not
    differentiable.

    **Smoothing.** With ``smooth``, every column is divided by a factor first, ``z = v / max(smooth, 1e-30)``, and each
    row has one scale. ``calibrate`` returns the largest magnitudes of the columns of v, from which the next smoothing
    vector is computed; keep running maxima with ``torch.maximum``. Gradients are those of v.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly
            spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        weight: ``[n]`` in x's dtype or float32. Default: ones (`offset` is then not used).
        eps: Added to the mean square. Default: 1e-6.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Added to x first; same shape and dtype as x.
        layout: "row" for codes of x's shape, "transposed" for codes ``[n, m]``, "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: Layout of the scales of rows: "row" or "column".
        rstd: float32, x's shape without the last dimension. Not with a residual.
        keep: Also return the values of y, rounded once from fp32. Not with layout "transposed".
        smooth: float32 ``[n]``, for layout "row".
        calibrate: Also return amax. Requires `smooth`.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A :class:`NormFp8`; all its tensors are contiguous.
    """
    options = _Options(eps, offset, layout, pow2_scale, scale_layout, keep, calibrate, False)
    return _norm_fp8(x, weight, None, residual, smooth, rstd, None, options)


@public(defaults={"eps": 1e-5})
def layer_norm_fp8(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float | None = None,
    offset: float = 0, residual: Tensor | None = None, layout: str = "row", pow2_scale: bool = False,
    scale_layout: str = "row", rstd: Tensor | None = None, mean: Tensor | None = None, keep: bool = False,
    smooth: Tensor | None = None, calibrate: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> NormFp8:  # fmt: skip
    """Normalise the last dimension to mean 0 and variance 1 and quantise the result to fp8 (e4m3).

    ``v = (h - mean(h)) / sqrt(var(h) + eps) * (offset + weight) + bias``; the rest is as for :func:`rms_norm_fp8`:
    codes, layouts, gradients (those of :func:`rtkernels.layer_norm`, in x, weight, bias and residual), recomputing
    (from rstd and mean), smoothing.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly
            spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        weight: ``[n]`` in x's dtype or float32. Default: ones (`offset` is then not used).
        bias: ``[n]`` in the weight's dtype. Default: zeros.
        eps: Added to the variance. Default: 1e-5.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Added to x first; same shape and dtype as x.
        layout: "row" for codes of x's shape, "transposed" for codes ``[n, m]``, "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: Layout of the scales of rows: "row" or "column".
        rstd: float32, x's shape without the last dimension. Requires `mean`. Not with a residual.
        mean: float32, shape as rstd.
        keep: Also return the values of y, rounded once from fp32. Not with layout "transposed".
        smooth: float32 ``[n]``, for layout "row".
        calibrate: Also return amax. Requires `smooth`.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A :class:`NormFp8`; all its tensors are contiguous.
    """
    options = _Options(eps, offset, layout, pow2_scale, scale_layout, keep, calibrate, True)
    return _norm_fp8(x, weight, bias, residual, smooth, rstd, mean, options)


OP = Op(
    "norm_fp8", public=("rms_norm_fp8", "layer_norm_fp8"), kernels=KERNELS, torch_ops=(FORWARD, SMOOTH),
    uses=("rms_norm", "layer_norm", "column_sum"),
)  # fmt: skip
