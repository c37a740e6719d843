"""Gated linear units with fp8 results of smoothed columns and one scale per row, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu_fp8_plan as plans
from rtkernels.ops.act.glu_fp8_plan import ACTS, TYPES, Inputs, experts_of, generic_step
from rtkernels.ops.act.glu_fp8_reference import check_sum, joined, rows_of, unquantized
from rtkernels.ops.act.glu_plan import result_shape
from rtkernels.ops.act.glu_reference import gradients
from rtkernels.ops.layout.transpose_plan import check_pad, padded, padded_rows
from rtkernels.ops.quant import reference as fp8
from rtkernels.ops.shared.fp8_layout import E4M3, asked, row_blocks_of
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, check_shape
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import as_rows, nothing, row_count, vector_bytes
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_THREADS = 256  # of a block; a warp works on a row
_BLOCKS = 4  # per SM

SMOOTH = Kernel(
    "act/glu_smooth_fp8.cu", "glu_fp8_smooth", template="FP32", max_registers=128,
    args="dy:ptr gate:ptr up:ptr weight:ptr counts:ptr smooth:ptr factor:ptr q:ptr scale:ptr dx:ptr dweight:ptr "
    "max_abs:ptr rows:i64 cols:i64 dy_stride:i64 gate_stride:i64 up_stride:i64 weight_type:i64 experts:i64 "
    "count_width:i64 pow2:i64 check:i64 act:i64 type:i64 words:i64",
    variants=[(False,), (True,)],
)  # fmt: skip


# ---- checks and planning --------------------------------------------------------------------------------------------


def _check_fp32(name: str, m: Meta | None, shape: Sequence[int]) -> None:
    if m is None:
        return
    check_same(name, m.dtype, torch.float32, "dtype", of="float32")
    check_shape(name, m.shape, shape)


def _line(counts: Any, cols: int) -> tuple[int, ...]:
    """Return the shape of a tensor with one element per column, or per expert and column."""
    return (cols,) if counts is None else (counts.shape[0], cols)


def _check_fwd(x, up, smooth, weight, counts, act) -> None:
    shape = plans.check_forward(x, up, weight, counts, act)
    _check_fp32("smooth", smooth, _line(counts, shape[-1]))


def _check_bwd(dy, x, up, smooth, factor, weight, counts, act, layout, keep, weight_grad, pad_to) -> None:
    shape = plans.check_backward(dy, x, up, weight, counts, act, layout, keep, weight_grad)
    _check_fp32("smooth", smooth, _line(counts, shape[-1]))
    _check_fp32("row_factor", factor, shape[:-1])
    check_pad(pad_to)
    if factor is not None and (layout == "row" or keep == "dense"):
        raise ArgumentError("row_factor is given; expected None without transposed codes, which it is for")


def _outputs_fwd(x, up, counts, with_maxima):
    shape = result_shape(x, up)
    maxima = Memory(_line(counts, shape[-1]), torch.float32, zero=True) if with_maxima else None
    return Memory(shape, E4M3), Memory(shape[:-1], torch.float32), maxima


def _codes_t(counts: Any, rows: int, cols: int, pad_to: int) -> tuple[int, ...]:
    """Return the shape of transposed codes: with counts, one dimension with room for the most padding possible."""
    if counts is None:
        return cols, padded(rows, pad_to)
    return (cols * padded_rows(rows, counts.shape[0], pad_to),)


def _outputs_bwd(dy, x, weight, counts, layout, keep, weight_grad, pad_to):
    q, scale, q_t, scale_t, *gradients = plans.outputs_bwd(dy, x, weight, counts, layout, keep, weight_grad)
    shape = (*dy.shape[:-1], 2 * dy.shape[-1])
    scale = scale and Memory(shape[:-1], torch.float32)
    if q_t and pad_to > 1:
        q_t = Memory(_codes_t(counts, row_count(shape), shape[-1], pad_to), E4M3, zero=True)
    scale_t = scale_t and Memory(_line(counts, shape[-1]), torch.float32, zero=True)
    return q, scale, q_t, scale_t, *gradients


def _step(given: Inputs, dy: Meta | None, cols: int, results: Sequence[str | int], device: int) -> Step:
    """Return the launch for rows. `results`: from smooth and factor on, all that follows the inputs."""
    x, _, weight, counts = given[:4]
    strides, size, rows = [m.row_stride for m in given.sources(dy)], x.dtype.itemsize, x.rows
    words = vector_bytes(misaligned(*given.sources(dy)), cols * size, *(s * size for s in strides)) >= 4 * size
    experts = experts_of(counts) or 0
    grid = min(-(-rows // (_THREADS // 32)), _BLOCKS * device_info(device).sm_count)
    launch = SMOOTH.bind((x.dtype == torch.float32,), device, grid, _THREADS, 8 * (experts + 1))
    sizes = rows, cols, *([0] * (dy is None)), *strides, 0 if weight is None else TYPES[weight.dtype], experts
    width = 4 if counts is None else counts.dtype.itemsize
    last = width, int(given.pow2_scale), int(given.check_counts), ACTS[given.act], TYPES[x.dtype], int(words)
    inputs = 0 if dy is None else "dy", "x", "up", "weight", "counts", "smooth"
    return Step(launch, *inputs, *results, *sizes, *last)


def _plan_fwd(x, up, weight, counts, act, pow2_scale, check_counts, device) -> Steps:
    given = Inputs(x, up, weight, counts, act, "row", pow2_scale, "row", check_counts)
    cols = x.shape[-1] // (2 if up is None else 1)
    return Steps(_step(given, None, cols, (0, "q", "scale", 0, 0, "maxima"), device))


def _plan_bwd(dy, x, up, weight, counts, act, layout, pow2_scale, check_counts, keep, pad_to, device) -> Steps:
    """Return the launch for rows and, for transposed codes, that of a second pass."""
    given = Inputs(x, up, weight, counts, act, layout, pow2_scale, "row", check_counts)
    cols = dy.shape[-1]
    if keep == "dense" or layout == "row":
        return Steps(_step(given, dy, cols, ("factor", "q", "scale", "dx", "dweight", 0), device))
    rows = _step(given, dy, cols, ("factor", "q", "scale", "dx", "dweight", "amax"), device)
    blocks = row_blocks_of(row_count(x.shape), experts_of(counts))
    results = 0, 0, "q_t", "scale_t", 0, 0, "factor", "amax"
    columns = generic_step(given._replace(check_counts=False), dy, blocks, results, device, pad_to=pad_to)
    return Steps(rows, columns, scratch={"amax": Memory(_line(counts, 2 * cols), torch.float32, zero=True)})


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _finite(v: Tensor) -> Tensor:
    return torch.where(v.isfinite(), v.abs(), 0.0)


def _reference_fwd(x, up, smooth, weight, counts, act, pow2_scale, with_maxima, check_counts):
    shape = result_shape(x, up)
    rows, cols = row_count(shape), shape[-1]
    check_sum(counts, rows, check_counts)
    y = unquantized(x, up, None, act).reshape(rows, cols)
    w = y.new_ones(rows, 1) if weight is None else weight.float().reshape(rows, 1)
    sizes = rows_of(counts, rows)
    each = [_finite(part).amax(0) if len(part) else y.new_zeros(cols) for part in y[: sum(sizes)].split(sizes)]
    z = y * (w * _spread(smooth, sizes, y, lambda s: 1 / s.clamp(min=1e-30)))
    q, scale = fp8.quantize(z, "row", E4M3, pow2_scale, "row")
    maxima = torch.stack(each) if counts is not None else each[0]
    return q.reshape(shape), scale.reshape(shape[:-1]), maxima if with_maxima else nothing(x)


def _spread(smooth: Tensor | None, sizes: list[int], like: Tensor, change=lambda s: s) -> Tensor:
    """Return the factor of every element; 1 for rows of no expert."""
    whole = torch.ones_like(like)
    if smooth is not None:
        begin = 0
        for line, size in zip(change(as_rows(smooth)), sizes, strict=True):
            whole[begin : begin + size] = line
            begin += size
    return whole


def _padded_codes(q: Tensor, pad_to: int) -> Tensor:
    """Return codes ``[columns, rows]`` with zeros behind each column, up to a multiple of rows."""
    codes = torch.zeros(q.shape[0], padded(q.shape[1], pad_to), dtype=torch.uint8, device=q.device)
    codes[:, : q.shape[1]] = q.view(torch.uint8)
    return codes.view(q.dtype)


def _reference_bwd(
    dy, x, up, smooth, factor, weight, counts, act, layout, pow2_scale, check_counts, keep, weight_grad, pad_to
):
    shape = (*dy.shape[:-1], 2 * dy.shape[-1])
    rows, cols = row_count(shape), shape[-1]
    check_sum(counts, rows, check_counts)
    whole, dweight = gradients(dy, x, up, weight, act, weight_grad)
    dx, sizes = whole.reshape(rows, cols), rows_of(counts, rows)
    q, scale, q_t, scale_t = (nothing(x) for _ in range(4))
    if keep != "dense" and layout != "transposed":
        q, scale = fp8.quantize(dx * _spread(smooth, sizes, dx), "row", E4M3, pow2_scale, "row")
        q, scale = q.reshape(shape), scale.reshape(shape[:-1])
    if keep != "dense" and layout != "row":
        scaled = dx if factor is None else dx * factor.reshape(rows, 1)
        each = []
        for part in scaled[: sum(sizes)].split(sizes):
            empty = part.new_empty((cols, 0), dtype=E4M3), part.new_zeros(cols)
            each.append(fp8.quantize(part.t().contiguous(), "row", E4M3, pow2_scale, "row") if part.numel() else empty)
        codes = _codes_t(counts, rows, cols, pad_to)
        q_t = joined([_padded_codes(e[0], pad_to) for e in each], codes, E4M3, x)
        scale_t = joined([e[1] for e in each], _line(counts, cols), torch.float32, x)
    return q, scale, q_t, scale_t, whole.to(x.dtype, copy=True).contiguous() if keep != "fp8" else nothing(x), dweight


_X, _UP = Rows("x", None), Rows("up", None, optional=True)
_SMOOTH, _FACTOR, _WEIGHT, _COUNTS = (Dense(n, None, optional=True) for n in ("smooth", "factor", "weight", "counts"))
FORWARD = Operator(
    "glu_smooth_fp8_fwd", (_X, _UP, _SMOOTH, _WEIGHT, _COUNTS),
    options="str act, bool pow2_scale, bool with_maxima, bool check_counts", results="q scale maxima",
    outputs=_outputs_fwd, plan=_plan_fwd, reference=_reference_fwd, check=_check_fwd,
)  # fmt: skip
BACKWARD = Operator(
    "glu_smooth_fp8_bwd", (Rows("dy", None), _X, _UP, _SMOOTH, _FACTOR, _WEIGHT, _COUNTS),
    options="str act, str layout, bool pow2_scale, bool check_counts, str keep, bool weight_grad, int pad_to",
    results="q scale q_t scale_t dx dweight", outputs=_outputs_bwd, plan=_plan_bwd, reference=_reference_bwd,
    check=_check_bwd,
)  # fmt: skip


class GluSmoothFp8(NamedTuple):
    """Codes (float8_e4m3fn), one scale (float32) per row, and the largest magnitudes of the columns or None."""

    q: Tensor
    scale: Tensor
    maxima: Tensor | None


class GluSmoothFp8Gradients(NamedTuple):
    """Gradients of [gate | up], as codes and scales and unquantised, and of the weight; None if not requested."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None


@public
def glu_smooth_fp8(
    x: Tensor, smooth: Tensor | None, up: Tensor | None = None, *, act: str = "silu", weight: Tensor | None = None,
    counts: Tensor | None = None, pow2_scale: bool = False, with_maxima: bool = False, check_counts: bool = False,
    divide: bool = True,
    out: tuple[Tensor | None, ...] | None = None,
) -> GluSmoothFp8:  # fmt: skip
    """Quantise ``act(gate) * up * weight / smooth`` to fp8 with one scale per row.

    Computed in fp32 and quantised without intermediate rounding, as :func:`quantize_fp8` does with granularity "row".
    The results never require grad; :func:`glu_smooth_fp8_backward` computes the gradient.

    Args:
        x: As for :func:`glu_fp8`: ``[..., 2 * d]``, or with `up` ``[..., d]``.
        smooth: ``[d]``, or ``[experts, d]`` with counts, float32: divisors of the columns, clamped to at least 1e-30.
            None for ones.
        up: As for :func:`glu_fp8`.
        act: As for :func:`glu`.
        weight: As for :func:`glu_fp8`.
        counts: As for :func:`glu_fp8`; rows beyond their sum are not quantised.
        pow2_scale: Round scales up to a power of two.
        with_maxima: Also return the largest finite ``|act(gate) * up|`` of each column, for calibration.
        check_counts: As for :func:`glu_fp8`.
        divide: If False, multiply by smooth instead.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(q, scale, maxima)``: codes of the shape of the result, scales ``x.shape[:-1]``, and maxima of
        the shape of smooth (None unless requested; 0 for experts without rows).
    """
    x, up, smooth, weight = detached(x, up, smooth, weight)
    if not divide and smooth is not None:
        smooth = smooth.reciprocal()
    q, scale, maxima = FORWARD.call(x, up, smooth, weight, counts, act, pow2_scale, with_maxima, check_counts)
    return GluSmoothFp8(q, scale, maxima if with_maxima else None)


@public
def glu_smooth_fp8_backward(
    dy: Tensor, x: Tensor, smooth: Tensor | None, up: Tensor | None = None, *, row_factor: Tensor | None = None,
    act: str = "silu", weight: Tensor | None = None, counts: Tensor | None = None, layout: str = "row",
    pow2_scale: bool = False, keep: str = "fp8", weight_grad: bool | None = None, check_counts: bool = False,
    divide: bool = False, pad_to: int = 1, out: tuple[Tensor | None, ...] | None = None,
) -> GluSmoothFp8Gradients:  # fmt: skip
    """Return the gradients of ``act(gate) * up * weight``; that of ``[gate | up]`` as fp8 codes, in x's dtype, or both.

    By rows, codes are those of ``gradient * smooth`` with one scale per row; transposed, those of
    ``gradient * row_factor`` with one scale per column (of each expert). Both are computed in fp32 and quantised once,
    without intermediate rounding. Deterministic. Not differentiable. Transposed codes need a second pass over the
    inputs and a temporary of the size of `scale_t`.

    Args:
        dy: ``[..., d]``, the gradient of the result, of x's dtype; any strides.
        x: As given to :func:`glu_smooth_fp8`.
        smooth: ``[2 * d]``, or ``[experts, 2 * d]`` with counts, float32: factors of the columns. None for ones.
        up: As given to :func:`glu_smooth_fp8`.
        row_factor: ``x.shape[:-1]``, float32: factors of the rows for the transposed codes. None for ones.
        act: As given to :func:`glu_smooth_fp8`.
        weight: As given to :func:`glu_smooth_fp8`.
        counts: As given to :func:`glu_smooth_fp8`.
        layout: "row" (`q`, `scale`), "transposed" (`q_t`, `scale_t`) or "both".
        pow2_scale: Round scales up to a power of two.
        keep: "fp8" for the codes, "dense" for the gradient in x's dtype (`dx`), "both" for both.
        weight_grad: Whether to compute the gradient of the weight. Default: if there is a weight.
        check_counts: As for :func:`glu_fp8`.
        divide: Divide by smooth and row_factor instead.
        pad_to: Pad the rows of the transposed codes, per expert, with zeros to a multiple of this.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(q, scale, q_t, scale_t, dx, dweight)`` with None for results that were not requested. `q` and
        `dx` are ``[..., 2 * d]``, `scale` is ``x.shape[:-1]``. `q_t` is ``[2 * d, m]``; with counts flat, an expert's
        part as for :func:`glu_fp8`. With `pad_to`, m and the rows of each expert are rounded up, and zeros fill the
        space for the largest possible padding. `scale_t` is ``[2 * d]``, with counts ``[experts, 2 * d]`` (0 for
        experts without rows).
    """
    if weight_grad is None:
        weight_grad = weight is not None
    if divide:
        smooth, row_factor = (None if t is None else t.detach().reciprocal() for t in (smooth, row_factor))
    inputs = detached(dy, x, up, smooth, row_factor, weight)
    *codes, dx, dweight = BACKWARD.call(
        *inputs, counts, act, layout, pow2_scale, check_counts, keep, weight_grad, pad_to
    )
    codes = asked("" if keep == "dense" else layout, codes)
    return GluSmoothFp8Gradients(*codes, dx if keep != "fp8" else None, dweight if weight_grad else None)
