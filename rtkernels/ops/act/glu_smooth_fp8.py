"""Gated linear units with fp8 results of smoothed columns and one scale per row, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu_fp8_plan as plans
from rtkernels.ops.act.glu_fp8_plan import ACTS, E4M3, TYPES, Metadata, Output, Plan, experts_of
from rtkernels.ops.act.glu_fp8_reference import check_sum, gradients, joined, rows_of, unquantized
from rtkernels.ops.quant import reference as fp8
from rtkernels.ops.quant.quantize_fp8_plan import empty_scale
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    address,
    check_same,
    is_dense,
    metadata,
    nothing,
    row_count,
    row_stride,
    rowed,
    vector_bytes,
)
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.operator import TorchOp

_THREADS, _BLOCKS = 256, 4  # threads of a block (a warp works on a row), and blocks per multiprocessor

SMOOTH = Kernel(
    "act/glu_smooth_fp8.cu",
    "glu_fp8_smooth",
    template="WIDE",
    args="dy:ptr gate:ptr up:ptr weight:ptr counts:ptr smooth:ptr factor:ptr q:ptr scale:ptr dx:ptr dweight:ptr "
    "most:ptr rows:i64 cols:i64 dy_stride:i64 gate_stride:i64 up_stride:i64 weight_type:i64 experts:i64 "
    "count_width:i64 pow2:i64 check:i64 act:i64 type:i64 words:i64",
    variants=[(False,), (True,)],
    max_registers=128,
)


# ---- checks and planning --------------------------------------------------------------------------------------------


def _check_fp32(name: str, m: Metadata | None, shape: Sequence[int], device: int) -> None:
    if m is None:
        return
    check_same(name, m[0], torch.float32, "dtype", of="float32")
    if tuple(m[1]) != tuple(shape):
        raise ArgumentError(f"{name} has shape {tuple(m[1])}; expected {tuple(shape)}")
    check_same(name, m[3], device, "device index")


def _line(counts: Metadata | None, cols: int) -> tuple[int, ...]:
    """Return the shape of what there is one of per column, or per expert and column."""
    return (cols,) if counts is None else (counts[1][0], cols)


def _check_fwd(x, up, smooth, weight, counts, act) -> tuple[int, ...]:
    shape = plans.check_forward(x, up, weight, counts, act, "row", "row")
    _check_fp32("smooth", smooth, _line(counts, shape[-1]), x[3])
    return shape


def _check_bwd(dy, x, up, smooth, factor, weight, counts, act, layout, keep, weight_grad) -> tuple[int, ...]:
    shape = plans.check_backward(dy, x, up, weight, counts, act, layout, "row", keep, weight_grad)
    _check_fp32("smooth", smooth, _line(counts, shape[-1]), x[3])
    _check_fp32("row_factor", factor, shape[:-1], x[3])
    if factor is not None and (layout == "row" or keep == "dense"):
        raise ArgumentError("row_factor is for the transposed codes, which were not asked for")
    return shape


def _launch_of(
    given: Sequence[Metadata | None], dy: Metadata | None, cols: int, act: str, pow2: bool, check: bool, align: int
):
    """Return a bound launch and its numbers, None if something has to be made dense first. `given`: x to factor."""
    x, up, weight, counts, smooth, factor = given
    sources = [dy, x, x if up is None else up]
    strides = [0 if m is None else row_stride(m[1], m[2]) for m in sources]
    vectors = [m is None or m[2] == (1,) for m in (counts, smooth if smooth and len(smooth[1]) == 1 else None)]
    if None in strides or not all(vectors) or not is_dense(weight) or not is_dense(factor):
        return None
    if smooth is not None and len(smooth[1]) == 2 and row_stride(smooth[1], smooth[2]) != smooth[1][1]:
        return None
    dtype, device, rows = x[0], x[3], row_count(x[1])
    experts, size = experts_of(counts) or 0, dtype.itemsize
    words = vector_bytes(align, cols * size, *(s * size for s in strides)) >= 4 * size
    grid = min(-(-rows // (_THREADS // 32)), _BLOCKS * device_info(device).sm_count)
    launch = SMOOTH.bind((dtype == torch.float32,), device, grid, _THREADS, 8 * (experts + 1))
    weight_type = 0 if weight is None else TYPES[weight[0]]
    width = 4 if counts is None else counts[0].itemsize
    last = (experts, width, int(pow2), int(check), ACTS[act], TYPES[dtype], int(words))
    return launch, (rows, cols, *strides, weight_type, *last)


def _plan_fwd(x, up, weight, counts, smooth, act, pow2, maxima, check, align) -> Plan | None:
    shape = _check_fwd(x, up, smooth, weight, counts, act)
    outputs: list[Output | None] = [(shape, E4M3), (shape[:-1], torch.float32), None, None]
    if 0 in shape:
        return Plan(None, (), x[3], outputs)
    bound = _launch_of((x, up, weight, counts, smooth, None), None, shape[-1], act, pow2, check, align)
    return None if bound is None else Plan(*bound, x[3], outputs)


def _plan_bwd(dy, x, up, weight, counts, smooth, factor, act, layout, pow2, check, keep, weight_grad, align):
    """Return the plan of the rows and that of the transposed codes, None where there is none; as _plan_fwd."""
    shape = _check_bwd(dy, x, up, smooth, factor, weight, counts, act, layout, keep, weight_grad)
    by_rows, transposed = keep != "dense" and layout != "transposed", keep != "dense" and layout != "row"
    outputs: list[Output | None] = [
        (shape, E4M3) if by_rows else None,
        (shape[:-1], torch.float32) if by_rows else None,
        (shape, x[0]) if keep != "fp8" else None,
        (weight[1], weight[0]) if weight_grad else None,
    ]
    codes = (row_count(shape), shape[-1])[::-1] if counts is None else (row_count(shape) * shape[-1],)
    if 0 in shape:
        return Plan(None, (), x[3], outputs), Plan(None, (), x[3], [(codes, E4M3)]) if transposed else None
    bound = _launch_of((x, up, weight, counts, smooth, factor), dy, dy[1][-1], act, pow2, check, align)
    if bound is None:
        return None
    whole = None
    if transposed:
        inputs = plans.Inputs(x, up, weight, counts, act, layout, pow2, "row", False)
        blocks = plans.row_blocks_of(row_count(shape), experts_of(counts))
        launch, args, _ = plans.bound_launch(inputs, dy, dy[1], blocks, align, any_case=True)
        whole = Plan(launch, args[2:], x[3], [(codes, E4M3)])
    return Plan(*bound, x[3], outputs), whole


FWD_PLANS = Plans(_plan_fwd)
BWD_PLANS = Plans(_plan_bwd)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _launch_fwd(x, up, smooth, weight, counts, act, pow2_scale, with_maxima, check_counts):
    addresses = x.data_ptr(), address(up), address(weight), address(counts), address(smooth)
    options = (act, pow2_scale, with_maxima, check_counts)
    inputs = [metadata(t) for t in (x, up, weight, counts, smooth)]
    plan = FWD_PLANS[(*inputs, *options, (addresses[0] | addresses[1]) & 15)]
    if plan is None:
        return _launch_fwd(rowed(x), rowed(up), *_contiguous(smooth, weight, counts), *options)
    cols = x.shape[-1] // (2 if up is None else 1)
    most = x.new_zeros(_line(inputs[3], cols), dtype=torch.float32) if with_maxima else None
    q, scale, _, _ = plan.run(0, *addresses, 0, extra=(address(most),))
    if cols == 0:
        scale.fill_(empty_scale(pow2_scale))
    return q, scale, nothing(x) if most is None else most


def _launch_bwd(dy, x, up, smooth, factor, weight, counts, act, layout, pow2_scale, check_counts, keep, weight_grad):
    addresses = dy.data_ptr(), x.data_ptr(), address(up), address(weight), address(counts)
    options = (act, layout, pow2_scale, check_counts, keep, weight_grad)
    inputs = [metadata(t) for t in (dy, x, up, weight, counts, smooth, factor)]
    found = BWD_PLANS[(*inputs, *options, (addresses[0] | addresses[1] | addresses[2]) & 15)]
    if found is None:
        rest = _contiguous(smooth, factor, weight, counts)
        return _launch_bwd(rowed(dy), rowed(x), rowed(up), *rest, *options)
    rows, whole = found
    most = scale_t = q_t = None
    if whole is not None:
        shape = _line(inputs[4], 2 * dy.shape[-1])
        most, scale_t = (x.new_zeros(shape, dtype=torch.float32) for _ in range(2))
    q, scale, dx, dweight = rows.run(*addresses, address(smooth), address(factor), extra=(address(most),))
    if dy.shape[-1] == 0:
        for output, value in ((scale, empty_scale(pow2_scale)), (dweight, 0.0)):
            if output is not None:
                output.fill_(value)
    if whole is not None:
        (q_t,) = whole.run(*addresses, 0, 0, extra=(address(scale_t), 0, 0, address(factor), address(most)))
    outputs = (q, scale, q_t, scale_t, dx, dweight)
    return tuple([nothing(x) if o is None else o for o in outputs])


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _finite(v: Tensor) -> Tensor:
    return torch.where(v.isfinite(), v.abs(), 0.0)


def _reference_fwd(x, up, smooth, weight, counts, act, pow2_scale, with_maxima, check_counts):
    shape = _check_fwd(*map(metadata, (x, up, smooth, weight, counts)), act)
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
    """Return what every element is multiplied with; 1 for rows of no expert."""
    whole = torch.ones_like(like)
    if smooth is not None:
        lines = change(smooth.reshape(-1, smooth.shape[-1])).repeat_interleave(smooth.new_tensor(sizes).long(), 0)
        whole[: len(lines)] = lines
    return whole


def _reference_bwd(dy, x, up, smooth, factor, weight, counts, act, layout, pow2_scale, check_counts, keep, weight_grad):
    inputs = [metadata(t) for t in (dy, x, up, smooth, factor, weight, counts)]
    shape = _check_bwd(*inputs, act, layout, keep, weight_grad)
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
        codes = (cols, rows) if counts is None else (cols * rows,)
        q_t = joined([e[0] for e in each], codes, E4M3, x)
        scale_t = joined([e[1] for e in each], _line(inputs[6], cols), torch.float32, x)
    return q, scale, q_t, scale_t, whole.to(x.dtype, copy=True).contiguous() if keep != "fp8" else nothing(x), dweight


# ---- operators ------------------------------------------------------------------------------------------------------


def _fake_fwd(x, up, smooth, weight, counts, act, pow2_scale, with_maxima, check_counts):
    shape = x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2)
    maxima = x.new_empty(_line(metadata(counts), shape[-1]), dtype=torch.float32) if with_maxima else nothing(x)
    return x.new_empty(shape, dtype=E4M3), x.new_empty(shape[:-1], dtype=torch.float32), maxima


def _fake_bwd(dy, x, up, smooth, factor, weight, counts, act, layout, pow2_scale, check_counts, keep, weight_grad):
    plans.check_options(layout, "row")
    shape, rows = (*dy.shape[:-1], 2 * dy.shape[-1]), row_count(dy.shape)
    q, scale, q_t, scale_t = (nothing(x) for _ in range(4))
    if keep != "dense" and layout != "transposed":
        q, scale = x.new_empty(shape, dtype=E4M3), x.new_empty(shape[:-1], dtype=torch.float32)
    if keep != "dense" and layout != "row":
        q_t = x.new_empty((shape[-1], rows) if counts is None else (shape[-1] * rows,), dtype=E4M3)
        scale_t = x.new_empty(_line(metadata(counts), shape[-1]), dtype=torch.float32)
    dx = nothing(x) if keep == "fp8" else x.new_empty(shape)
    return q, scale, q_t, scale_t, dx, weight.new_empty(weight.shape) if weight_grad else nothing(x)


FORWARD = TorchOp(
    "glu_smooth_fp8_fwd(Tensor x, Tensor? up, Tensor? smooth, Tensor? weight, Tensor? counts, str act, "
    "bool pow2_scale, bool with_maxima, bool check_counts) -> (Tensor, Tensor, Tensor)",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "glu_smooth_fp8_bwd(Tensor dy, Tensor x, Tensor? up, Tensor? smooth, Tensor? factor, Tensor? weight, "
    "Tensor? counts, str act, str layout, bool pow2_scale, bool check_counts, str keep, bool weight_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


class GluSmoothFp8(NamedTuple):
    """Codes (float8_e4m3fn), one scale (float32) per row, and the largest magnitudes of the columns or None."""

    q: Tensor
    scale: Tensor
    maxima: Tensor | None


class GluSmoothFp8Gradients(NamedTuple):
    """The gradient of [gate | up] as codes and scales and unquantised, and that of the weight; None: not asked for."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None


def glu_smooth_fp8(
    x: Tensor,
    smooth: Tensor | None,
    up: Tensor | None = None,
    *,
    act: str = "silu",
    weight: Tensor | None = None,
    counts: Tensor | None = None,
    pow2_scale: bool = False,
    with_maxima: bool = False,
    check_counts: bool = False,
) -> GluSmoothFp8:
    """Quantise ``act(gate) * up * weight / smooth`` to fp8, with one scale for each row.

    Computed in fp32 and quantised without being rounded in between, as :func:`quantize_fp8` does with granularity
    "row". The results never require grad: :func:`glu_smooth_fp8_backward` gives the gradient.

    Args:
        x: As for :func:`glu_fp8`: ``[..., 2 * d]``, or with `up` ``[..., d]``.
        smooth: ``[d]``, or ``[experts, d]`` with counts, float32: what each column is divided by (at least 1e-30). None
            for ones.
        up: As for :func:`glu_fp8`.
        act: As for :func:`glu`.
        weight: As for :func:`glu_fp8`.
        counts: As for :func:`glu_fp8`; rows beyond their sum are not quantised.
        pow2_scale: Round scales up to a power of two.
        with_maxima: Also return the largest finite ``|act(gate) * up|`` of each column, for calibration.
        check_counts: As for :func:`glu_fp8`.

    Returns:
        A named tuple ``(q, scale, maxima)``: codes of the shape of the result, scales ``x.shape[:-1]``, and maxima of
        the shape of smooth (None unless asked for; 0 for experts without rows).
    """
    options = {"act": act, "weight": weight, "counts": counts, "pow2_scale": pow2_scale, "with_maxima": with_maxima}
    if not isinstance(x, Tensor):
        return GluSmoothFp8(*interop.call(glu_smooth_fp8, x, smooth, up, **options, check_counts=check_counts))
    x, up, smooth, weight = detached(x, up, smooth, weight)
    q, scale, maxima = FORWARD(x, up, smooth, weight, counts, act, pow2_scale, with_maxima, check_counts)
    return GluSmoothFp8(q, scale, maxima if with_maxima else None)


def glu_smooth_fp8_backward(
    dy: Tensor,
    x: Tensor,
    smooth: Tensor | None,
    up: Tensor | None = None,
    *,
    row_factor: Tensor | None = None,
    act: str = "silu",
    weight: Tensor | None = None,
    counts: Tensor | None = None,
    layout: str = "row",
    pow2_scale: bool = False,
    keep: str = "fp8",
    weight_grad: bool | None = None,
    check_counts: bool = False,
) -> GluSmoothFp8Gradients:
    """Compute the gradients of ``act(gate) * up * weight``, that of ``[gate | up]`` as fp8 codes, as it is, or both.

    By rows, codes are those of ``gradient * smooth`` with one scale per row; transposed, those of
    ``gradient * row_factor`` with one scale per column (of each expert). fp32 arithmetic and no rounding in between,
    one quantisation each. Deterministic. Not differentiable. Transposed codes need a second pass over the inputs and a
    temporary of the size of `scale_t`.

    Args:
        dy: ``[..., d]``, the gradient of the result, of x's dtype; any strides.
        x: As given to :func:`glu_smooth_fp8`.
        smooth: ``[2 * d]``, or ``[experts, 2 * d]`` with counts, float32: what each column is multiplied with. None for
            ones.
        up: As given to :func:`glu_smooth_fp8`.
        row_factor: ``x.shape[:-1]``, float32: what each row is multiplied with before the transposed codes are made.
            None for ones.
        act: As given to :func:`glu_smooth_fp8`.
        weight: As given to :func:`glu_smooth_fp8`.
        counts: As given to :func:`glu_smooth_fp8`.
        layout: "row" (`q`, `scale`), "transposed" (`q_t`, `scale_t`) or "both".
        pow2_scale: Round scales up to a power of two.
        keep: "fp8" for the codes, "dense" for the gradient in x's dtype (`dx`), "both" for both.
        weight_grad: Whether to compute the gradient of the weight; None: if there is a weight.
        check_counts: As for :func:`glu_fp8`.

    Returns:
        A named tuple ``(q, scale, q_t, scale_t, dx, dweight)`` with None for what was not asked for. `q` and `dx` are
        ``[..., 2 * d]``, `scale` is ``x.shape[:-1]``. `q_t` is ``[2 * d, m]``; with counts flat, an expert's part as
        for :func:`glu_fp8`. `scale_t` is ``[2 * d]``, with counts ``[experts, 2 * d]`` (0 for experts without rows).
    """
    if weight_grad is None:
        weight_grad = weight is not None
    if not isinstance(dy, Tensor):
        options = {"row_factor": row_factor, "act": act, "weight": weight, "counts": counts, "layout": layout}
        options |= {"pow2_scale": pow2_scale, "keep": keep, "weight_grad": weight_grad, "check_counts": check_counts}
        return GluSmoothFp8Gradients(*interop.call(glu_smooth_fp8_backward, dy, x, smooth, up, **options))
    inputs = detached(dy, x, up, smooth, row_factor, weight)
    outputs = BACKWARD(*inputs, counts, act, layout, pow2_scale, check_counts, keep, weight_grad)
    by_rows, transposed = keep != "dense" and layout != "transposed", keep != "dense" and layout != "row"
    asked = (by_rows, by_rows, transposed, transposed, keep != "fp8", weight_grad)
    return GluSmoothFp8Gradients(*(o if wanted else None for o, wanted in zip(outputs, asked, strict=True)))
