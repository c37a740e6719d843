"""fp8 codes and scales of rows sorted by expert, with groups that never cross from one expert to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8_kernels import EXPERTS, EXPERTS_STREAM, GROUP, WIDTH
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, Matrix, Metadata, groups_of, tile_threads
from rtkernels.ops.shared.tile_stream import TILE_BYTES, PatchLaunch, supported
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.memory import allocator, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import check_same, metadata, nothing, row_stride, token
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

OUTPUTS = ("row", "transposed", "both")
MAX_EXPERTS = 8192  # their table is in shared memory

Options = tuple[int, int, int]  # experts, bytes of a count, the most row blocks there can be

_STREAM_TYPES = (("bf16", "e4m3"), ("fp16", "e4m3"))
_STREAM_SLOTS, _STREAM_STATIC_SHARED = 2, 18560
# Tiles per multiprocessor from which on the kernel that gets them by the copy engine is faster. Measured on the H200.
_STREAM_TURNS = 5

# ---- shapes and checks ----------------------------------------------------------------------------------------------


def row_blocks(rows: int, experts: int) -> int:
    """Return the most blocks of 128 rows that `rows` rows of `experts` experts can be cut into."""
    return (rows + (GROUP - 1) * min(experts, rows)) // GROUP


def _shapes(rows: int, cols: int, experts: int, output: str) -> list[tuple[int, ...] | None]:
    """Return the shapes of q, scale, q_t, scale_t; None for what is not asked for."""
    along: list[tuple[int, ...] | None] = [(rows, cols), (rows * groups_of(cols),)]
    down: list[tuple[int, ...] | None] = [(rows * cols,), (row_blocks(rows, experts), cols)]
    nothing_here: list[tuple[int, ...] | None] = [None, None]
    return (nothing_here if output == "transposed" else along) + (nothing_here if output == "row" else down)


def _check(x: Metadata, counts: Metadata, output: str, dtype: torch.dtype) -> None:
    if output not in OUTPUTS:
        raise ArgumentError(f"layout is {output!r}; expected one of {', '.join(map(repr, OUTPUTS))}")
    token("x", x[0])
    token("the result", dtype, FP8_DTYPES)
    if len(x[1]) != 2:
        raise ArgumentError(f"x has shape {tuple(x[1])}; expected two dimensions, rows sorted by expert")
    if x[1][0] >= 2**31:
        raise ArgumentError(f"x has {x[1][0]} rows; expected less than 2^31")
    if counts[0] not in (torch.int32, torch.int64):
        raise ArgumentError(f"counts has dtype {counts[0]}; expected int32 or int64".replace("torch.", ""))
    if len(counts[1]) != 1 or not 1 <= counts[1][0] <= MAX_EXPERTS:
        raise ArgumentError(
            f"counts has shape {tuple(counts[1])}; expected one dimension, the rows of 1 to {MAX_EXPERTS} experts"
        )
    check_same("counts", counts[3], x[3], "device index")


# ---- launcher -------------------------------------------------------------------------------------------------------


class _Plan:
    __slots__ = ("_allocate", "_launch", "_outputs")

    def __init__(self, x: Metadata, align: int, counts: Metadata, output: str, dtype: torch.dtype, pow2: bool) -> None:
        t, f = token("x", x[0]), token("the result", dtype, FP8_DTYPES)
        m = Matrix(x, align, WIDTH[t], flat=False)
        experts = counts[1][0]
        options = (experts, counts[0].itemsize, row_blocks(m.rows, experts))
        if output != "row" and (t, f) in _STREAM_TYPES and _streams(m, options):
            self._launch = _stream_launch(m, t, options, pow2)
        else:
            self._launch = _tile_launch(m, t, f, options, pow2)
        self._allocate = allocator(m.device)
        dtypes = (dtype, torch.float32) * 2
        shapes = _shapes(m.rows, m.cols, experts, output)
        self._outputs = [(s and (s, dense_strides(s), d)) for s, d in zip(shapes, dtypes, strict=True)]

    def run(self, x: Tensor, address: int, counts: Tensor) -> tuple[Tensor, ...]:
        outputs = [output and self._allocate(*output) for output in self._outputs]
        self._launch(address, counts.data_ptr(), *[0 if output is None else output.data_ptr() for output in outputs])
        return tuple(nothing(x) if output is None else output for output in outputs)


def _tile_launch(m: Matrix, t: str, f: str, options: Options, pow2: bool) -> Callable[..., None]:
    experts, _, blocks = options
    tiles, wide, threads = groups_of(m.cols), m.vec > 1, tile_threads(t)
    resident = 1024 // threads // (1 if wide else 2) * device_info(m.device).sm_count
    launch = EXPERTS.bind((t, f, wide), m.device, min(blocks * tiles, resident), threads, shared=8 * (experts + 1))
    args = (m.rows, m.cols, m.stride, *options, tiles, pow2)
    return lambda *addresses: launch(*addresses, *args)


def _stream_launch(m: Matrix, t: str, options: Options, pow2: bool) -> Callable[..., None]:
    tiles, layout = options[2] * groups_of(m.cols), (t, m.rows, m.cols, m.stride)
    launch = PatchLaunch(EXPERTS_STREAM, (t,), m.device, tiles, _stream_shared(options), [layout])
    args = (m.rows, m.cols, *options, pow2)
    return lambda x, *addresses: launch([x], addresses, args)


def _streams(m: Matrix, options: Options) -> bool:
    """Return whether the kernel that gets its tiles by the copy engine fits, and is faster."""
    info, tiles = device_info(m.device), groups_of(m.rows) * groups_of(m.cols)
    fits = _stream_shared(options) + _STREAM_STATIC_SHARED <= info.shared_per_block and m.cols < 2**30
    return (
        fits and m.vec > 1 and m.cols <= m.stride and supported(info.target) and tiles >= _STREAM_TURNS * info.sm_count
    )


def _stream_shared(options: Options) -> int:
    return _STREAM_SLOTS * TILE_BYTES + 8 * (options[0] + 1)


def _plan(x: Metadata, counts: Metadata, output: str, dtype: torch.dtype, pow2: bool, align: int) -> _Plan | None:
    _check(x, counts, output, dtype)
    if 0 in x[1] or row_stride(x[1], x[2]) is None:
        return None
    return _Plan(x, align, counts, output, dtype, pow2)


PLANS = Plans(_plan)


def _launch(x: Tensor, counts: Tensor, output: str, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, ...]:
    address = x.data_ptr()
    plan = PLANS[metadata(x), metadata(counts), output, dtype, pow2_scale, address & 15]
    if plan is None:
        if x.numel() == 0:
            return _fake(x, counts, output, dtype, pow2_scale, fill=True)
        return _launch(x.contiguous(), counts, output, dtype, pow2_scale)
    return plan.run(x, address, counts.contiguous())


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference(x: Tensor, counts: Tensor, output: str, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, ...]:
    _check(metadata(x), metadata(counts), output, dtype)
    results = _fake(x, counts, output, dtype, pow2_scale, fill=True)
    q, scale, q_t, scale_t = results
    first, block, groups, cols = 0, 0, groups_of(x.shape[1]), x.shape[1]
    for count in counts.tolist():
        end = min(first + max(count, 0), x.shape[0])
        part = x[first:end]
        if output != "transposed":
            codes, scales = reference.quantize(part, "group", dtype, pow2_scale, "column")
            q[first:end] = codes
            scale[first * groups : end * groups] = scales.flatten()
        if output != "row":
            codes, scales = reference.quantize(part, "group_t", dtype, pow2_scale, "row")
            q_t[first * cols : end * cols] = codes.flatten()
            scale_t[block : block + len(scales)] = scales
        first, block = end, block + groups_of(end - first)
    return results


def _fake(x, counts, output, dtype, pow2_scale, fill=False):
    make = x.new_zeros if fill else x.new_empty
    shapes = _shapes(*x.shape, counts.shape[0], output)
    return tuple(
        nothing(x) if shape is None else make(shape, dtype=kind)
        for shape, kind in zip(shapes, (dtype, torch.float32) * 2, strict=True)
    )


QUANTIZE = TorchOp(
    "quantize_fp8_experts(Tensor x, Tensor counts, str output, ScalarType dtype, bool pow2_scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class QuantizedExperts(NamedTuple):
    """Codes and scales of the experts' rows, one expert after the other; None for what was not asked for.

    For x ``[t, n]`` with ``g = ceil(n/128)``, and an expert with rows ``s`` to ``s + c - 1``, before which there are
    ``b`` blocks of 128 rows (the last one of each expert may be shorter):

    Attributes:
        q: ``[t, n]``, rows as in x.
        scale: ``[t * g]``. The expert's part ``[s * g : (s + c) * g]`` is a matrix ``[g, c]``: one scale per 128
            columns of a row, as quantize_fp8 gives it for granularity "group" and layout "column".
        q_t: ``[t * n]``. The expert's part ``[s * n : (s + c) * n]`` is a matrix ``[n, c]``.
        scale_t: ``[blocks, n]``. The expert's part begins at row ``b``: one scale per 128 rows of a column. There are
            ``(t + 127 * min(experts, t)) // 128`` rows, enough for any counts; those past the last block are 0.
    """

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


def quantize_fp8_experts(
    x: Tensor,
    counts: Tensor,
    *,
    layout: str = "both",
    dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False,
    output: str | None = None,
) -> QuantizedExperts:
    """Quantise rows sorted by expert to fp8, in groups of 128 along rows, along columns, or both from one read.

    Each expert's rows are quantised as :func:`quantize_fp8` quantises a matrix of them (granularities "group" and
    "group_t"), and the results are put one after the other: see :class:`QuantizedExperts`. The host never reads
    `counts`, so nothing waits for the device and the call can be captured in a CUDA graph.

    Not differentiable: the results never require grad.

    Args:
        x: ``[t, n]``, bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride). May be
            any object with ``__dlpack__``; the results are then of its kind.
        counts: Rows of each expert, ``[experts]``, int32 or int64 on x's device; zeros are fine. Negative counts are
            taken as 0 and rows are never read past the end. Should the sum be less than t, the rows left over (padding)
            are not quantised, and what the results hold for them is unspecified.
        layout: "row" (q and scale), "transposed" (q_t and scale_t) or "both".
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.
        output: Another name of `layout`.

    Returns:
        A :class:`QuantizedExperts`, all of it dense.
    """
    layout = layout if output is None else output
    if not isinstance(x, Tensor):
        options: dict[str, Any] = {"layout": layout, "dtype": dtype, "pow2_scale": pow2_scale}
        return interop.call(quantize_fp8_experts, x, counts, **options)
    if x.requires_grad:
        x = x.detach()
    q, scale, q_t, scale_t = QUANTIZE(x, counts, layout, dtype, pow2_scale)
    if layout == "row":
        return QuantizedExperts(q, scale, None, None)
    if layout == "transposed":
        return QuantizedExperts(None, None, q_t, scale_t)
    return QuantizedExperts(q, scale, q_t, scale_t)


# The counts of the benchmark: 32 experts of 2048 to 6144 rows each, multiples of 16.
_COUNTS = [4688, 3280, 5280, 2432, 2640, 2816, 5040, 2512, 3792, 2352, 2752, 5600, 5472, 2608, 4016, 2784]
_COUNTS += [5520, 2528, 3056, 3872, 2544, 5296, 2448, 3856, 2416, 3136, 4416, 5472, 3216, 3008, 4560, 3520]


OP = Op(
    "quantize_fp8_experts",
    public=("quantize_fp8_experts",),
    kernels=(EXPERTS, EXPERTS_STREAM),
    torch_ops=(QUANTIZE,),
)
