"""fp8 of tensors whose columns or rows are scaled first: "smooth" quantisation, with calibration, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import quantize_fp8_channel as channel
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.column_absmax import ABSMAX, column_steps, max_step
from rtkernels.ops.quant.column_absmax import reference as absmax_reference
from rtkernels.ops.quant.quantize_fp8 import QUANTIZE, dequantize_fp8
from rtkernels.ops.shared.fp8_layout import E4M3, FP8_DTYPES
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_dimensions, check_same, check_shape, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import (
    DTYPE_TOKEN,
    GRID_LIMIT,
    block_of,
    group_threads,
    nothing,
    reads_evict_first,
    row_count,
)
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Aligned, Argument, Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

GRANULARITIES = ("row", "channel")
_THREADS = 512
_CHUNKS = 4
_CALIBRATION_BLOCKS_PER_SM = 5

_KERNEL = Kernel(
    "quant/smooth.cu", "quantize_fp8_smooth", template="T CALIBRATE", max_registers=116,
    args="x:ptr factor:ptr expert:ptr q:ptr scale:ptr partial:ptr rows:i64 x_cols:i64 x_stride:i64 q_cols:i64 "
    "threads_per_row:i64 pow2:i64 evict_first:i64",
    variants=[("bf16", False), ("fp32", False), ("bf16", True)],
)  # fmt: skip

# ---- plan -----------------------------------------------------------------------------------------------------------


def _check(x: Meta, smooth: Meta, expert: Meta | None, dtype: torch.dtype) -> None:
    token("x", x.dtype)
    token("the result", dtype, FP8_DTYPES)
    check_dimensions("x", x.shape)
    cols = x.shape[-1]
    token("smooth", smooth.dtype, (torch.float32,))
    wanted = (cols,) if expert is None else (smooth.shape[0] if smooth.shape else 1, cols)
    check_shape("smooth", smooth.shape, wanted, "one per column of x")
    if expert is not None:
        token("expert", torch.float32 if expert.dtype == torch.int32 else expert.dtype, (torch.float32,))
        check_same("expert", tuple(expert.shape), (x.rows,), "shape", of="the rows of x")


def _plan(x: Meta, dtype: torch.dtype, pow2_scale: bool, with_amax: bool, device: int) -> Steps:
    kind = torch.float32 if x.dtype == torch.float16 else x.dtype  # exact
    meta, x_cols, converted = channel.whole_rows(x, kind)
    rows, cols, vector = x.rows, x.shape[-1], 16 // kind.itemsize
    if x_cols > _THREADS * _CHUNKS * vector or dtype != E4M3:
        return Steps(instead=_smoothed_and_quantized)
    if x_cols > cols:
        converted["smooth"] = partial(F.pad, pad=(0, x_cols - cols))
    threads = group_threads(-(-x_cols // (vector * _CHUNKS)), _THREADS)
    block = block_of(threads)
    groups = block // threads
    calibrate = with_amax and kind == torch.bfloat16 and x_cols == cols  # others have a pass of their own for that
    limit = _CALIBRATION_BLOCKS_PER_SM * device_info(device).sm_count if calibrate else GRID_LIMIT
    grid = min(-(-rows // groups), limit)
    launch = _KERNEL.bind((DTYPE_TOKEN[kind], calibrate), device, grid, block)
    stride, evict_first = meta.row_stride, reads_evict_first(rows * x_cols * kind.itemsize)
    sizes = rows, x_cols, stride, cols, threads, int(pow2_scale), evict_first
    tensors = "x", "smooth", "expert", "q", "scale", "largest" if calibrate else 0
    steps, scratch = [Step(launch, *tensors, *sizes)], {}
    if calibrate:
        scratch = {"largest": Memory((grid * groups, x_cols), torch.float32)}
        steps.append(max_step("largest", "amax", grid * groups, x_cols, device))
    elif with_amax:
        more, scratch = column_steps(meta, device, ("x", 0, 0, "amax"))
        steps = [*more, *steps]
    return Steps(*steps, scratch=scratch, converted=converted)


def _smoothed_and_quantized(
    x: Tensor, smooth: Tensor, expert: Tensor | None, dtype: torch.dtype, pow2_scale: bool, with_amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """e5m2, rows too long for registers: the values are stored and then quantised."""
    z = _smoothed(x, smooth, expert).contiguous()  # it has the strides of x
    q, scale = QUANTIZE.launch(z, "row", dtype, pow2_scale, "row")
    return q, scale, ABSMAX.launch(x, None, None) if with_amax else nothing(x)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _smoothed(x: Tensor, smooth: Tensor, expert: Tensor | None) -> Tensor:
    if expert is None:
        return x.float() * smooth
    return x.float() * smooth[expert.long()].view(x.shape)


def _reference(x, smooth, expert, dtype, pow2_scale, with_amax):
    amax = absmax_reference(x, None, None) if with_amax else nothing(x)
    return *reference.quantize(_smoothed(x, smooth, expert), "row", dtype, pow2_scale, "row"), amax


def _outputs(x, dtype, with_amax):
    amax = Memory(x.shape[-1:], torch.float32) if with_amax else None
    return Memory(x.shape, dtype), Memory(x.shape[:-1], torch.float32), amax


SMOOTH = Operator(
    "quantize_fp8_smooth", (Argument("x", None), Aligned("smooth", None), Dense("expert", None, optional=True)),
    options="ScalarType dtype, bool pow2_scale, bool with_amax", results="q scale amax", outputs=_outputs, plan=_plan,
    reference=_reference, check=_check,
)  # fmt: skip


class SmoothQuantized(NamedTuple):
    """Codes and scales of a scaled tensor.

    Attributes:
        q: fp8 codes: of x's shape, or ``[n, m]`` for granularity "channel".
        scale: Of the rows (x's shape without the last dimension), or of the columns, ``[n]``.
        amax: Largest finite magnitude of each column of x itself, ``[n]``; None if not asked for.
    """

    q: Tensor
    scale: Tensor
    amax: Tensor | None


def expert_of_rows(counts: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, int32; rows past the sum of counts belong to the last one."""
    ends = counts.clamp(min=0).cumsum(0)
    numbers = torch.arange(rows, dtype=torch.int64, device=counts.device)
    return torch.searchsorted(ends, numbers, right=True, out_int32=True).clamp_(max=counts.shape[0] - 1)


@public
def quantize_fp8_smooth(
    x: Tensor, smooth: Tensor | None = None, *, divide: bool = False, row_factor: Tensor | None = None,
    counts: Tensor | None = None, granularity: str = "row", dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False, with_amax: bool = False, pad_to: int = 1, divide_rows: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> SmoothQuantized:  # fmt: skip
    """Quantise ``z = x * smooth * row_factor`` to fp8 with one scale per row or per column.

    The recipe is that of :func:`quantize_fp8`; z is fp32 and not rounded before quantisation. Granularity "row" has one
    scale per row of z (per token). Granularity "channel" has one per column, and transposed codes: ``q[j, i]`` is the
    code of ``z[i, j]``.

    Not differentiable: the results never require grad.

    Args:
        x: At least one dimension, leading ones are flattened to ``[m, n]``; bfloat16, float16 or float32, and for
            "channel" also float8_e4m3fn (codes to quantise again, with their old scales as row_factor). Any strides
            (copied unless rows are unit-stride, evenly spaced and a multiple of 16 bytes). Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        smooth: Factors of the columns, float32 ``[n]``; with counts ``[experts, n]``. Optional for "channel".
        divide: Multiply by ``1 / smooth`` (rounded to float32) instead.
        row_factor: Factors of the rows, float32 ``[m]``; for "channel" only.
        counts: Rows of each expert, ``[experts]``, int32 or int64 on x's device; for "row" only. The host never reads
            them. Rows past their sum belong to the last expert.
        granularity: "row" or "channel".
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.
        with_amax: Also return the largest magnitudes of x's columns for calibration, with counts per expert; for "row"
            only.
        pad_to: For "channel": pad the rows of q with zeros to a multiple of this.
        divide_rows: Multiply by ``1 / row_factor`` (rounded to float32) instead.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A :class:`SmoothQuantized`.
    """
    _check_options(granularity, smooth, row_factor, counts, with_amax, pad_to)
    x, smooth, row = detached(x, smooth, row_factor)
    if divide and smooth is not None:
        smooth = smooth.reciprocal()
    if divide_rows and row is not None:
        row = row.reciprocal()
    if granularity == "channel":
        return SmoothQuantized(*channel.CHANNEL.call(x, row, smooth, dtype, pow2_scale, pad_to), None)
    expert = None if counts is None else _experts(counts, smooth, x)
    by_kernel = with_amax and expert is None
    q, scale, amax = SMOOTH.call(x, smooth, expert, dtype, pow2_scale, by_kernel)
    if with_amax and expert is not None:
        amax = _amax_of_experts(x, expert, smooth.shape[0])
    return SmoothQuantized(q, scale, amax if with_amax else None)


def _check_options(granularity, smooth, row_factor, counts, with_amax: bool, pad_to: int) -> None:
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"granularity is {granularity!r}; expected one of 'row', 'channel'")
    if granularity == "row":
        if smooth is None:
            raise ArgumentError("smooth is None; granularity 'row' needs the factors of the columns")
        if row_factor is not None:
            raise ArgumentError("row_factor requires granularity 'channel': here it would change only the scale")
        if pad_to != 1:
            raise ArgumentError(f"pad_to is {pad_to}; expected 1 for granularity 'row'")
    elif counts is not None or with_amax:
        raise ArgumentError("counts and with_amax require granularity 'row'")


def _amax_of_experts(x: Tensor, expert: Tensor, experts: int) -> Tensor:
    """Return the largest finite magnitudes of columns over the rows of each expert: ``[experts, n]``, float32."""
    found = x.detach().reshape(-1, x.shape[-1]).float().abs()
    found = torch.where(found.isfinite(), found, 0.0)
    rows = expert.long()[:, None].expand_as(found)
    return found.new_zeros(experts, x.shape[-1]).scatter_reduce_(0, rows, found, "amax")


def _experts(counts: Tensor, smooth: Tensor, x: Tensor) -> Tensor:
    if counts.dtype not in (torch.int32, torch.int64) or counts.dim() != 1 or smooth.dim() != 2:
        raise ArgumentError(
            f"counts has dtype {str(counts.dtype).removeprefix('torch.')} and shape {tuple(counts.shape)}, smooth has "
            f"shape {tuple(smooth.shape)}; expected int32 or int64 [experts] and [experts, columns]"
        )
    check_same("counts", counts.shape[0], smooth.shape[0], "length", of="smooth")
    check_same("counts", counts.get_device(), x.get_device(), "device index")
    return expert_of_rows(counts, row_count(x.shape))


@public(options={"rows": Within("int")})
def dequantize_fp8_smooth(
    q: Tensor, scale: Tensor, smooth: Tensor | None = None, *, divide: bool = False, row_factor: Tensor | None = None,
    counts: Tensor | None = None, granularity: str = "row", rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Undo :func:`quantize_fp8_smooth`: return ``q * scale`` without the factors.

    Computed in fp32 and rounded once. Not differentiable.

    Args:
        q: Codes, float8_e4m3fn or float8_e5m2; ``[n, p]`` for granularity "channel".
        scale: As quantize_fp8_smooth returned it.
        smooth: As given to quantize_fp8_smooth.
        divide: As given to quantize_fp8_smooth.
        row_factor: As given to quantize_fp8_smooth.
        counts: As given to quantize_fp8_smooth.
        granularity: As given to quantize_fp8_smooth.
        rows: For "channel": the number of rows of x, if q is padded.
        dtype: bfloat16, float16 or float32.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor of q's shape; ``[rows, n]`` for "channel".
    """
    _check_options(granularity, q if smooth is None else smooth, row_factor, counts, False, 1)
    if counts is not None and smooth is None:
        raise ArgumentError("counts is given without smooth; expected the factors of each expert with it")
    if granularity == "channel" and rows is not None:
        q = q[:, :rows]
    token("the result", dtype)
    plain = smooth is None and row_factor is None
    y = dequantize_fp8(q, scale, granularity=granularity, dtype=dtype if plain else torch.float32)
    steps: list[tuple[Callable[..., Tensor], Tensor]] = []
    if smooth is not None:
        experts = smooth.shape[:1] if counts is not None else ()
        _check_factor("smooth", smooth, (*experts, y.shape[-1]))
        smooth = smooth.detach()
        lines = smooth if counts is None else smooth[_experts(counts, smooth, q).long()].view(q.shape)
        steps.append((torch.mul if divide else torch.div, lines))
    if row_factor is not None:
        _check_factor("row_factor", row_factor, y.shape[:1])
        steps.append((torch.div, row_factor.detach()[:, None]))
    for nth, (apply, factors) in enumerate(steps, 1):  # the last one rounds to the result's dtype
        y = apply(y, factors, out=torch.empty_like(y, dtype=dtype)) if nth == len(steps) else apply(y, factors)
    return y


def _check_factor(name: str, factor: Tensor, shape: tuple[int, ...]) -> None:
    if factor.dtype != torch.float32 or factor.shape != shape:
        came = f"{str(factor.dtype).removeprefix('torch.')} {list(factor.shape)}"
        raise ArgumentError(f"{name} is {came}; expected float32 {list(shape)}")


_OPTIONS = {
    "alpha": Within("float", "0.0 <= alpha <= 1.0", "0 to 1"),
    "floor": Within("float", "0.0 < floor < float('inf')", "a positive number"),
}


@public(over="amax", tensors="amax", options=_OPTIONS)
def smooth_factors(
    amax: Tensor, weight_amax: Tensor | None = None, *, alpha: float = 0.5, floor: float = 1e-5, pow2: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return factors for :func:`quantize_fp8_smooth` from calibration maxima.

    ``max(weight_amax, floor)^(1 - alpha) * max(amax, floor)^-alpha``, or without weight_amax only the second factor.
    Multiply the columns of the activations by these factors and divide those of the weight. Not differentiable.

    Args:
        amax: Largest magnitudes of the columns of activations, float32: see :func:`column_absmax`, or with_amax.
        weight_amax: The same for the columns of the weight, or None.
        alpha: Fraction of the spread that moves from the activations to the weight, 0 to 1.
        floor: Lower limit of the maxima.
        pow2: Round up to powers of two, so that scaling is exact.
        out: Tensor to write the result to, with its shape, dtype and strides. May be amax. Not with gradients.

    Returns:
        float32, in amax's shape.
    """
    token("amax", amax.dtype)
    factors = amax.detach().float().clamp(min=floor).pow(-alpha)
    if weight_amax is not None:
        token("weight_amax", weight_amax.dtype)
        check_same("weight_amax", weight_amax.shape, amax.shape, "shape", of="amax")
        factors = weight_amax.detach().float().clamp(min=floor).pow(1 - alpha) * factors
    if pow2:
        factors = reference.to_pow2(factors)
    return factors


OP = Op(
    "smooth_quant", public=("quantize_fp8_smooth", "dequantize_fp8_smooth", "quantize_fp8_shard_", "smooth_factors"),
    kernels=(_KERNEL, channel.KERNEL), torch_ops=(SMOOTH, channel.CHANNEL),
    uses=("quantize_fp8", "column_absmax", "transpose"),
)  # fmt: skip
