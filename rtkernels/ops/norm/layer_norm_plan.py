"""The kernels of layer_norm, and which one runs how for which tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.norm.checks import check_inputs as check
from rtkernels.ops.shared.bulk_ring import BulkRing, bulk_ring
from rtkernels.ops.shared.column_sum import column_sum
from rtkernels.runtime.launch.device import DeviceInfo, device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    address,
    block_of,
    float_halves,
    group_threads,
    halves,
    is_dense,
    nothing,
    row_count,
    row_stride,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.plan import DensePlan
from rtkernels.runtime.targets import Target

_UNIT, _BWD_UNIT = "norm/layer_norm.cu", "norm/layer_norm_bwd.cu"
_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_REGISTER_THREADS, _REGISTER_CHUNKS = 512, 4
_SHORT = 32  # pieces of 16 bytes in rows that have one in each thread, unless there is a residual
_EVEN = ((2, 128), (4, 256))  # exactly as many in each thread, and the most threads
_EVEN_THREADS = 96  # and the fewest
_SMALL_CHUNKS = {"bf16": 2, "fp16": 2, "fp32": 4}  # pieces of 16 bytes in a thread of a row that has a block to itself
_PIECE_THREADS = 1024  # or one of them, if there is nothing else than a weight and a bias of its type
_SMALL_THREADS = 1024  # in such a block, and on a multiprocessor in all: with more rows the others are faster
_RING_THREADS = 512
_RING_CHUNKS = {2: 1024, 4: 2048}  # pieces of 16 bytes in a thread, and in the longest row it is used for
_WIDTHS = [(t, vec) for t in _WIDTH for vec in (1, _WIDTH[t])]


def _bulk_ring(info: DeviceInfo, rows: int, vectors: int, inputs: int) -> BulkRing | None:
    """Return how layer_norm_bwd_bulk is launched for rows of so many pieces of 16 bytes; None if it cannot be.

    With 64 KB asked for at a time 8192x4096 takes 57.4 µs, 58.8 with 96 KB; 2048x4096 23.2 and 21.7, 8192x8192 112.4
    and 106.7, 1024x4096 15.1 and 15.45. Blocks of 384 threads at 1536 and 2048 columns: 26.7 and 32.5, with 512 27.5
    and 33.3.
    """
    threads = group_threads(-(-vectors // 2), _RING_THREADS)
    more = threads > 256 or (threads > 128 and 8 * info.sm_count < rows < 32 * info.sm_count)
    most = 384 if 64 < threads <= 128 else _RING_THREADS
    return bulk_ring(info, rows, vectors, 2, inputs, most, (96 if more else 64) << 10, 0)


def _ring_stages(limit: int, chunks: int, dsum: bool) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes.

    Two are best: 38.2 µs against 39.6 with four at 8192x2048, 63.6 against 64.7 with three at 8192x4096.
    """
    return min(2, (limit - 2048) // (_RING_THREADS * 16 * chunks * (3 if dsum else 2)))


def _ring_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    for t in _WIDTH:
        for chunks in _RING_CHUNKS:
            for dsum in (False, True):
                stages = _ring_stages(shared_limit(target), chunks, dsum)
                if stages >= 2:
                    yield t, chunks, dsum, stages


_FWD_ARGS = (
    "x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 eps:f64 offset:f64"
)
_BWD_ARGS = (
    "dy:ptr h:ptr weight:ptr dsum:ptr dh:ptr {last}:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 "
    "dsum_stride:i64 threads_per_row:i64 eps:f64 offset:f64 wide:i64"
)
_FWD = Kernel(
    _UNIT,
    "layer_norm_fwd",
    template="T W CHUNKS RESIDUAL",
    args=_FWD_ARGS,
    variants=[
        (t, w, c, r) for t, w in _TYPES for c, r in ((1, False), (_REGISTER_CHUNKS, False), (_REGISTER_CHUNKS, True))
    ],
    max_registers=128,
)
_FWD_EVEN = Kernel(
    _UNIT,
    "layer_norm_fwd_even",
    template="T W PIECES THREADS",
    args=_FWD_ARGS,
    variants=[(t, w, p, n) for t, w in _TYPES for p, n in _EVEN if p == 2 or t == w],
    max_registers=80,
)
_FWD_SMALL = Kernel(
    "norm/layer_norm_small.cu",
    "layer_norm_fwd_small",
    template="T CHUNKS",
    args="x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr cols_wide:i64 x_stride:i64 residual_stride:i64 "
    "eps_offset:i64",
    variants=list(_SMALL_CHUNKS.items()),
    max_registers=64,
)
_FWD_PIECE = Kernel(
    "norm/layer_norm_small.cu",
    "layer_norm_fwd_piece",
    template="T",
    args="x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr cols_eps:i64 x_stride:i64",
    variants=[(t,) for t in _WIDTH],
    max_registers=48,
)
_FWD_LONG = Kernel(
    _UNIT,
    "layer_norm_fwd_long",
    template="T VEC",
    args=f"{_FWD_ARGS} wide:i64",
    variants=_WIDTHS,
    max_registers=64,
)
_BWD = Kernel(
    _BWD_UNIT,
    "layer_norm_bwd",
    template="T CHUNKS DSUM STAGES",
    args=f"{_BWD_ARGS.format(last='partial')} partial_stride:i64",
    variants=_ring_variants,
    max_registers=128,
)
_BWD_BULK = Kernel(
    "norm/layer_norm_bwd_bulk.cu",
    "layer_norm_bwd_bulk",
    template="T DSUM",
    args="dy:ptr h:ptr rows_cols:i64 pitches:i64 threads_stages:i64 weight:ptr dh:ptr partial:ptr dsum:ptr "
    "dsum_flags:i64 eps_offset:i64",
    variants=list(product(_WIDTH, (False, True))),
    max_registers=128,
    needs=("tma",),
)
_BWD_LONG = Kernel(
    _BWD_UNIT,
    "layer_norm_bwd_long",
    template="T VEC",
    args=_BWD_ARGS.format(last="stats"),
    variants=_WIDTHS,
    max_registers=64,
)
_BWD_WEIGHT = Kernel(
    _BWD_UNIT,
    "layer_norm_bwd_weight",
    template="T VEC",
    args="dy:ptr h:ptr stats:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 partial_stride:i64",
    variants=_WIDTHS,
    max_registers=40,
)


# ---- validation and planning: plain metadata in, a bound launch out -------------------------------------------------

Meta = tuple[Any, ...]


def _parameter_dtype(weight: Meta | None, bias: Meta | None, dtype: torch.dtype) -> torch.dtype:
    return weight[0] if weight is not None else bias[0] if bias is not None else dtype


def _evenly(vectors: int, one_type: bool) -> tuple[int, int] | None:
    """Return PIECES and THREADS of layer_norm_fwd_even for rows of so many pieces of 16 bytes; None if it cannot."""
    for pieces, most in _EVEN if one_type else _EVEN[:1]:
        if vectors % (32 * pieces) == 0 and _EVEN_THREADS <= vectors // pieces <= most:
            return pieces, most
    return None


def _small_threads(info: DeviceInfo, rows: int, vectors: int, chunks: int) -> int:
    """Return the threads of a row of layer_norm_fwd_small; 0 if rows are too many, or of too many pieces, for it."""
    pieces = next((c for c in (1, 2) if vectors <= 512 * c), chunks)  # in the threads of this row
    threads = -(-vectors // (32 * pieces)) * 32
    return threads if threads <= _SMALL_THREADS and rows * threads <= _SMALL_THREADS * info.sm_count else 0


def _and_float(lower: int, upper: float) -> int:
    """Return an integer and a number of fp32 in one argument, as halves does two integers."""
    return halves(lower, float_halves(upper, 0.0) & 0xFFFFFFFF)


class ForwardPlan(DensePlan):
    """Its launch takes x, residual, weight, bias, y and sum."""

    __slots__ = ()

    def run(self, x: int, weight: int, bias: int) -> Tensor:
        y = self.allocate(*self.layout)
        if self.launch is not None:
            self.launch(x, 0, weight, bias, y.data_ptr(), 0)
        return y


def _plan_fwd(
    x: Meta, weight: Meta | None, bias: Meta | None, residual: Meta | None, align: int, eps: float, offset: float
) -> ForwardPlan | None:
    """Return a plan, None if an input must be copied first."""
    check(x, weight, bias, residual)
    dtype, shape, stride, device = x
    rows, cols = row_count(shape), shape[-1]
    memory = dense_memory(device, shape, dtype)
    if rows == 0 or cols == 0:
        return ForwardPlan(None, *memory)
    x_stride = row_stride(shape, stride)
    residual_stride = 0 if residual is None else row_stride(residual[1], residual[2])
    if x_stride is None or residual_stride is None or not (is_dense(weight) and is_dense(bias)):
        return None
    t, w = token("x", dtype), token("weight", _parameter_dtype(weight, bias, dtype))
    size = dtype.itemsize
    full = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) == 16
    vectors = cols // _WIDTH[t]
    small = _small_threads(device_info(device), rows, vectors, _SMALL_CHUNKS[t]) if full else 0
    plain = weight is not None and bias is not None and residual is None and t == w and offset == 0
    if small and plain and vectors <= _PIECE_THREADS:
        launch = _FWD_PIECE.bind((t,), device, rows, -(-vectors // 32) * 32, ending=(_and_float(cols, eps), x_stride))
        return ForwardPlan(launch, *memory)
    if small:
        ending = (halves(cols, w == "fp32"), x_stride, residual_stride, float_halves(eps, offset))
        launch = _FWD_SMALL.bind((t, _SMALL_CHUNKS[t]), device, rows, small, ending=ending)
        return ForwardPlan(launch, *memory)
    even = _evenly(vectors, t == w) if full and residual is None and rows <= GRID_LIMIT else None
    if even is not None:
        threads = vectors // even[0]
        kernel, variant, wide = _FWD_EVEN, (t, w, *even), ()
    elif full and vectors <= _REGISTER_THREADS * _REGISTER_CHUNKS:
        chunks = 1 if vectors <= _SHORT and residual is None else _REGISTER_CHUNKS
        threads = group_threads(-(-vectors // chunks), _REGISTER_THREADS)
        kernel, variant, wide = _FWD, (t, w, chunks, residual is not None), ()
    else:
        vec = _WIDTH[t] if full else 1
        threads = group_threads(-(-cols // vec), 1024)
        kernel, variant, wide = _FWD_LONG, (t, vec), (int(w == "fp32"),)
    block = threads if even is not None else block_of(threads)
    grid = min(-(-rows // (block // threads)), GRID_LIMIT)
    ending = (rows, cols, x_stride, residual_stride, threads, eps, offset, *wide)
    return ForwardPlan(kernel.bind(variant, device, grid, block, ending=ending), *memory)


FWD_PLANS = Plans(_plan_fwd)


class _BackwardPlan:
    """The launches of one backward call and the workspace they need."""

    def __init__(self, dy: Meta, h: Meta, weight: Meta | None, dsum: Meta | None, align: int, sums: int) -> None:
        dtype, shape, _, device = h
        t, info = token("h", dtype), device_info(device)
        size, rows, cols = dtype.itemsize, row_count(shape), shape[-1]
        strides = [row_stride(*m[1:3]) for m in (dy, h)] + [0 if dsum is None else row_stride(*dsum[1:3])]
        full = vector_bytes(align, cols * size, *(s * size for s in strides)) == 16
        vectors = cols // _WIDTH[t]
        wide = int(weight is not None and weight[0] == torch.float32)
        chunks = next((c for c, most in _RING_CHUNKS.items() if vectors <= most), 0)
        stages = _ring_stages(info.shared_per_block, chunks, dsum is not None) if chunks else 0
        self.rows, self.cols, self.sums, self.partial_launch, self.bulk_args = rows, cols, sums, None, None
        inputs = 2 if dsum is None else 3
        bulk = full and chunks == 2 and max(strides) < 2**30
        if bulk and (r := _bulk_ring(info, rows, vectors, inputs)):
            threads, self.partial_rows = r.threads, r.blocks
            self.launch = _BWD_BULK.bind((t, dsum is not None), device, r.blocks, r.block, r.shared)
            pitches = [stride * size for stride in strides]
            self.bulk_args = (
                (halves(rows, cols), halves(*pitches[:2]), halves(threads, r.stages | r.groups << 8)),
                halves(pitches[2], wide | (sums > 1) << 1),
            )
        elif full and stages >= 2 and rows < 2**30:
            threads = group_threads(-(-vectors // chunks), _RING_THREADS)
            most = _RING_THREADS // threads if threads <= 32 else min(_RING_THREADS // threads, 15)
            groups = max(1, min(most, rows // info.sm_count))
            groups += -groups % (32 // min(threads, 32))  # whole warps
            shared = stages * groups * threads * 16 * chunks * inputs
            self.partial_rows = min(info.sm_count, -(-rows // groups))
            variant = (t, chunks, dsum is not None, stages)
            self.launch = _BWD.bind(variant, device, self.partial_rows, groups * threads, shared)
            self.tail = (wide, max(sums, 1) * cols)
        else:
            vec = _WIDTH[t] if full else 1
            threads = group_threads(-(-cols // vec), 1024)
            block = block_of(threads)
            self.launch = _BWD_LONG.bind((t, vec), device, min(-(-rows // (block // threads)), GRID_LIMIT), block)
            self.tail = (wide,)
            if sums:
                column_blocks = -(-cols // (256 * vec))
                self.partial_rows = min(max(1, 4 * info.sm_count // column_blocks), rows, 65535)
                self.partial_launch = _BWD_WEIGHT.bind((t, vec), device, (column_blocks, self.partial_rows), 256)
                self.partial_args = (rows, cols, *strides[:2], sums * cols)
        self.args = (rows, cols, *strides, threads)

    def run(
        self,
        dy: Tensor,
        h: Tensor,
        weight: Tensor | None,
        dsum: Tensor | None,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        over: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return dh, which is h itself if `over` and no second kernel reads h, and the sums for the parameters."""
        dh = h if over and self.partial_launch is None else torch.empty(h.shape, dtype=h.dtype, device=h.device)
        inputs = (dy.data_ptr(), h.data_ptr(), address(weight), address(dsum))
        if self.bulk_args is not None:
            return dh, self._run_bulk(inputs, dh, eps, offset, dtype)
        if not self.sums:
            self.launch(*inputs, dh.data_ptr(), 0, *self.args, eps, offset, *self.tail)
            return dh, nothing(h)
        partial = torch.empty(self.partial_rows, self.sums * self.cols, dtype=torch.float32, device=h.device)
        if self.partial_launch is None:
            self.launch(*inputs, dh.data_ptr(), partial.data_ptr(), *self.args, eps, offset, *self.tail)
        else:
            stats = torch.empty(self.rows, 2, dtype=torch.float32, device=h.device)
            self.launch(*inputs, dh.data_ptr(), stats.data_ptr(), *self.args, eps, offset, *self.tail)
            self.partial_launch(*inputs[:2], stats.data_ptr(), partial.data_ptr(), *self.partial_args)
        return dh, column_sum(partial, dtype).view(self.sums, self.cols)

    def _run_bulk(self, inputs: tuple[int, ...], dh: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        (dy, h, weight, dsum), (shape, flags) = inputs, self.bulk_args
        partial = None
        if self.sums:
            partial = torch.empty(self.partial_rows, self.sums * self.cols, dtype=torch.float32, device=dh.device)
        ending = (weight, dh.data_ptr(), address(partial), dsum, flags, float_halves(eps, offset))
        self.launch(dy, h, *shape, *ending)
        if partial is None:
            return nothing(dh)
        return column_sum(partial, dtype, beside=False).view(self.sums, self.cols)


BWD_PLANS = Plans(_BackwardPlan)


KERNELS = (_FWD, _FWD_EVEN, _FWD_SMALL, _FWD_PIECE, _FWD_LONG, _BWD, _BWD_BULK, _BWD_LONG, _BWD_WEIGHT)
