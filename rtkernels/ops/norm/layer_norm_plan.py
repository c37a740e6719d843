"""The kernels of layer_norm, the choice between them, and their launches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.checks import check_gradients, check_inputs
from rtkernels.ops.shared.bulk_ring import BulkRing, bulk_ring, copy_ring
from rtkernels.ops.shared.column_sum import column_sum_step, parts_grid
from rtkernels.runtime import layout
from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import DeviceInfo, device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, TYPES, WEIGHTED_TYPES, WIDTH, block_of, group_threads, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

_UNIT = "norm/layer_norm.cu"
_BWD_UNIT = "norm/layer_norm_bwd.cu"
_REGISTER_THREADS = 512
_REGISTER_CHUNKS = 4
_LONG_CHUNKS = 6  # for rows of more than _LONG vectors, without a residual
_LONG = 1024
_SHORT = 32  # vectors of a row up to which each thread has one, unless there is a residual
_UNIFORM = ((2, 128), (4, 256))  # vectors that each thread has, and how many threads there may be
_UNIFORM_THREADS = 96  # the fewest
_SMALL_CHUNKS = {"bf16": 2, "fp16": 2, "fp32": 4}  # vectors of a thread whose block has one row
_VECTOR_THREADS = 1024  # or one of them, if there is nothing else than a weight and a bias of its type
_SMALL_THREADS = 1024  # of such a block, and the limit per SM: with more rows the other kernels are faster
_RING_THREADS = 512
_RING_CHUNKS = {2: 1024, 4: 2048}  # vectors of a thread: those of the longest row
_LONG_RING = 160 << 10  # bytes of the ring with four vectors a thread
_WIDTHS = [(t, vec) for t in WIDTH for vec in (1, WIDTH[t])]


def _bulk_ring(info: DeviceInfo, rows: int, vectors: int, chunks: int, inputs: int, gain_bytes: int) -> BulkRing | None:
    """Return how layer_norm_bwd_bulk is launched for rows of so many vectors; None if it cannot be.

    Bytes in flight and threads were measured: docs/decisions/norm.md, "Numbers behind constants". With four vectors a
    thread, gains take `gain_bytes` of shared memory for each of them.
    """
    if chunks == 4:
        return bulk_ring(info, rows, vectors, 4, inputs, _RING_THREADS, _LONG_RING, 0, 4 * gain_bytes)
    threads, rows_of_sm = group_threads(-(-vectors // 2), _RING_THREADS), choice_rows(rows) / info.sm_count
    more = threads > 256 or (threads > 128 and 8 < rows_of_sm < 32)
    max_threads = 384 if 64 < threads <= 128 else _RING_THREADS
    return bulk_ring(info, rows, vectors, 2, inputs, max_threads, (96 if more else 64) << 10, 0)


def _ring_stages(target: Target, limit: int, chunks: int, dsum: bool) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes: two where they fit.

    With TMA, only rows of up to two vectors a thread get here, in a few cases.
    """
    if chunks > 2 and "tma" in target.features:
        return 0
    return min(2, (limit - 2048) // (_RING_THREADS * 16 * chunks * (3 if dsum else 2)))


def _ring_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    for t in WIDTH:
        for chunks in _RING_CHUNKS:
            for dsum in (False, True):
                stages = _ring_stages(target, shared_limit(target), chunks, dsum)
                if stages >= 2:
                    yield t, chunks, dsum, stages


_FWD_ARGS = (
    "x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 eps:f64 offset:f64"
)
_BWD_ARGS = (
    "dy:ptr h:ptr weight:ptr dsum:ptr dh:ptr {last}:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 "
    "dsum_stride:i64 threads_per_row:i64 eps:f64 offset:f64 weight_fp32:i64"
)
_FWD = Kernel(
    _UNIT, "layer_norm_fwd", template="T W CHUNKS", max_registers=128,
    args=_FWD_ARGS,
    variants=[(*types, c) for types in WEIGHTED_TYPES for c in (1, _REGISTER_CHUNKS, _LONG_CHUNKS)],
)  # fmt: skip
_FWD_UNIFORM = Kernel(
    _UNIT, "layer_norm_fwd_uniform", template="T W VECTORS THREADS", max_registers=80,
    args=_FWD_ARGS, variants=[(t, w, p, n) for t, w in WEIGHTED_TYPES for p, n in _UNIFORM if p == 2 or t == w],
)  # fmt: skip
_FWD_SMALL = Kernel(
    "norm/layer_norm_small.cu", "layer_norm_fwd_small", template="T CHUNKS", max_registers=64,
    args="x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr cols_weight_fp32:i64 x_stride:i64 residual_stride:i64 "
    "eps_offset:i64",
    variants=list(_SMALL_CHUNKS.items()),
)  # fmt: skip
_FWD_VECTOR = Kernel(
    "norm/layer_norm_small.cu", "layer_norm_fwd_vector", template="T", max_registers=48,
    args="x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr cols_eps:i64 x_stride:i64",
    variants=TYPES,
)  # fmt: skip
_FWD_LONG = Kernel(
    _UNIT, "layer_norm_fwd_long", template="T VEC", args=f"{_FWD_ARGS} weight_fp32:i64", variants=_WIDTHS,
    max_registers=64,
)  # fmt: skip
_BWD = Kernel(
    _BWD_UNIT, "layer_norm_bwd", template="T CHUNKS DSUM STAGES", max_registers=128,
    args=f"{_BWD_ARGS.format(last='partial')} partial_stride:i64", variants=_ring_variants,
)  # fmt: skip
_BWD_BULK = Kernel(
    "norm/layer_norm_bwd_bulk.cu", "layer_norm_bwd_bulk", template="T CHUNKS DSUM", max_registers=128, needs=("tma",),
    args="dy:ptr h:ptr rows_cols:i64 pitches:i64 threads_stages:i64 weight:ptr dh:ptr partial:ptr dsum:ptr "
    "dsum_flags:i64 eps_offset:i64",
    variants=list(product(WIDTH, _RING_CHUNKS, (False, True))),
)  # fmt: skip
_BWD_LONG = Kernel(
    _BWD_UNIT, "layer_norm_bwd_long", template="T VEC", max_registers=64,
    args=_BWD_ARGS.format(last="stats"), variants=_WIDTHS,
)  # fmt: skip
_BWD_WEIGHT = Kernel(
    _BWD_UNIT, "layer_norm_bwd_weight", template="T VEC", max_registers=40,
    args="dy:ptr h:ptr stats:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 partial_stride:i64",
    variants=_WIDTHS,
)  # fmt: skip


def check_bwd(
    dy: Meta, h: Meta, weight: Meta | None, bias: Meta | None, dsum: Meta | None, parameter_grad: bool
) -> None:
    """Raise an ArgumentError for arguments of the backward that do not fit together."""
    check_inputs(h, weight, bias)
    check_gradients(h, dy, dsum)
    if parameter_grad and weight is None and bias is None:
        raise ArgumentError("parameter_grad is True but there is neither weight nor bias")


def parameter_sums(weight: Any, bias: Any, wanted: bool) -> tuple[int, torch.dtype | None]:
    """Return the number of parameter gradients of a backward call, and their dtype. dbias always follows dweight."""
    if not wanted:
        return 0, None
    return (1, weight.dtype) if bias is None else (2, bias.dtype)


def _evenly(vectors: int, one_type: bool) -> tuple[int, int] | None:
    """Return VECTORS and THREADS of layer_norm_fwd_uniform for rows of so many vectors; None if it cannot take them."""
    for per_thread, max_threads in _UNIFORM if one_type else _UNIFORM[:1]:
        if vectors % (32 * per_thread) == 0 and _UNIFORM_THREADS <= vectors // per_thread <= max_threads:
            return per_thread, max_threads
    return None


def _vectors_per_thread(vectors: int) -> int:
    """Return the vectors of a thread of layer_norm_fwd for rows of so many, without a residual."""
    return 1 if vectors <= _SHORT else _REGISTER_CHUNKS if vectors <= _LONG else _LONG_CHUNKS


def _small_threads(info: DeviceInfo, rows: int, vectors: int, chunks: int) -> int:
    """Return the threads of a row of layer_norm_fwd_small; 0 if rows are too many, or too long, for it."""
    per_thread = next((c for c in (1, 2) if vectors <= 512 * c), chunks)  # in the threads of this row
    threads = -(-vectors // (32 * per_thread)) * 32
    rows = choice_rows(rows)
    return threads if threads <= _SMALL_THREADS and rows * threads <= _SMALL_THREADS * info.sm_count else 0


def _and_float(lower: int, upper: float) -> int:
    """Return an integer and a number of fp32 in one argument, as layout.halves does two integers."""
    return layout.halves(lower, layout.float_halves(upper, 0.0) & 0xFFFFFFFF)


def plan_fwd(
    x: Meta, weight: Meta | None, bias: Meta | None, eps: float, offset: float, device: int,
    residual: Meta | None = None, out: Meta | None = None,
) -> Steps:  # fmt: skip
    """Return the launch, with or without a residual, into new memory or into `out`."""
    added, total = (0, 0) if residual is None else ("residual", "sum")
    tensors = "x", added, "weight", "bias", "y" if out is None else "out", total
    t, size = x.token, x.dtype.itemsize
    parameter = weight or bias or x
    w, rows, cols, x_stride = parameter.token, x.rows, x.shape[-1], x.row_stride
    residual_stride = 0 if residual is None else residual.row_stride
    starts = misaligned(x, residual, weight, bias, out)
    aligned16 = vector_bytes(starts, cols * size, x_stride * size, residual_stride * size) == 16
    vectors = cols // WIDTH[t]
    small = _small_threads(device_info(device), rows, vectors, _SMALL_CHUNKS[t]) if aligned16 else 0
    plain = weight is not None and bias is not None and residual is None and t == w and offset == 0
    if small and plain and vectors <= _VECTOR_THREADS:
        launch = _FWD_VECTOR.bind((t,), device, rows, -(-vectors // 32) * 32)
        return Steps(Step(launch, *tensors, _and_float(cols, eps), x_stride))
    if small:
        launch = _FWD_SMALL.bind((t, _SMALL_CHUNKS[t]), device, rows, small)
        ending = layout.halves(cols, w == "fp32"), x_stride, residual_stride, layout.float_halves(eps, offset)
        return Steps(Step(launch, *tensors, *ending))
    uniform = _evenly(vectors, t == w) if aligned16 and residual is None and rows <= GRID_LIMIT else None
    if uniform is not None:
        threads = vectors // uniform[0]
        kernel, variant, flags = _FWD_UNIFORM, (t, w, *uniform), ()
    elif aligned16 and vectors <= _REGISTER_THREADS * _REGISTER_CHUNKS:
        chunks = _vectors_per_thread(vectors) if residual is None else _REGISTER_CHUNKS
        threads = group_threads(-(-vectors // chunks), _REGISTER_THREADS)
        kernel, variant, flags = _FWD, (t, w, chunks), ()
    else:
        vec = WIDTH[t] if aligned16 else 1
        threads = group_threads(-(-cols // vec), 1024)
        kernel, variant, flags = _FWD_LONG, (t, vec), (int(w == "fp32"),)
    block = threads if uniform is not None else block_of(threads)
    launch = kernel.bind(variant, device, min(-(-rows // (block // threads)), GRID_LIMIT), block)
    return Steps(Step(launch, *tensors, rows, cols, x_stride, residual_stride, threads, eps, offset, *flags))


def plan_bwd(
    dy: Meta, h: Meta, weight: Meta | None, bias: Meta | None, dsum: Meta | None, eps: float, offset: float,
    parameter_grad: bool, device: int, dh: str = "dh",
) -> Steps:  # fmt: skip
    """Return what writes the gradient to `dh`, which may be h itself unless a second kernel reads h."""
    t, info = h.token, device_info(device)
    sums, dtype = parameter_sums(weight, bias, parameter_grad)
    size, rows, cols = h.dtype.itemsize, h.rows, h.shape[-1]
    strides = [m.row_stride for m in (dy, h)] + [0 if dsum is None else dsum.row_stride]
    aligned16 = vector_bytes(misaligned(dy, h, weight, dsum), cols * size, *(s * size for s in strides)) == 16
    vectors = cols // WIDTH[t]
    weight_fp32 = int(weight is not None and weight.dtype == torch.float32)
    chunks = next((c for c, limit in _RING_CHUNKS.items() if vectors <= limit), 0)
    stages = _ring_stages(info.target, info.shared_per_block, chunks, dsum is not None) if chunks else 0
    inputs, partial = 2 if dsum is None else 3, "partial" if sums else 0
    overlaps, second, ring = True, [], None
    if aligned16 and chunks and max(strides) < 2**30:
        ring = _bulk_ring(info, rows, vectors, chunks, inputs, 32 if weight_fp32 and t != "fp32" else 16)
    tensors, scratch = ("dy", "h", "weight", "dsum", dh), {}
    if ring:
        overlaps, partial_rows = False, ring.blocks
        launch = _BWD_BULK.bind((t, chunks, dsum is not None), device, ring.blocks, ring.block, ring.shared)
        pitches = [stride * size for stride in strides]
        groups = layout.halves(ring.threads, ring.stages | ring.groups << 8)
        sizes = layout.halves(rows, cols), layout.halves(*pitches[:2]), groups
        flags = layout.halves(pitches[2], weight_fp32 | (sums > 1) << 1), layout.float_halves(eps, offset)
        first = Step(launch, "dy", "h", *sizes, "weight", dh, partial, "dsum", *flags)
    elif aligned16 and stages >= 2 and rows < 2**30:
        threads, block, partial_rows, shared = copy_ring(info, rows, vectors, chunks, inputs, _RING_THREADS, stages)
        launch = _BWD.bind((t, chunks, dsum is not None, stages), device, partial_rows, block, shared)
        tail = weight_fp32, max(sums, 1) * cols
        first = Step(launch, *tensors, partial, rows, cols, *strides, threads, eps, offset, *tail)
    else:
        vec = WIDTH[t] if aligned16 else 1
        threads = group_threads(-(-cols // vec), 1024)
        launch = _BWD_LONG.bind((t, vec), device, *layout.row_blocks(rows, threads))
        last = "stats" if sums else 0
        first = Step(launch, *tensors, last, rows, cols, *strides, threads, eps, offset, weight_fp32)
        if sums:
            grid = parts_grid(info, rows, cols, vec)
            partial_rows, launch = grid[1], _BWD_WEIGHT.bind((t, vec), device, grid, 256)
            second = [Step(launch, "dy", "h", "stats", "partial", rows, cols, *strides[:2], sums * cols)]
            scratch["stats"] = Memory((rows, 2), torch.float32)
    if sums:
        scratch["partial"] = Memory((partial_rows, sums * cols), torch.float32)
        second.append(
            column_sum_step("partial", "gradients", partial_rows, sums * cols, dtype, device, overlaps=overlaps)
        )
    return Steps(first, *second, scratch=scratch)


KERNELS = (_FWD, _FWD_UNIFORM, _FWD_SMALL, _FWD_VECTOR, _FWD_LONG, _BWD, _BWD_BULK, _BWD_LONG, _BWD_WEIGHT)
