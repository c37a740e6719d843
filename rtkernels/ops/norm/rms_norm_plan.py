"""How rms_norm is launched: kernel records, and from tensor metadata to a bound launch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.bulk_ring import bulk_ring
from rtkernels.ops.shared.column_sum import column_sum
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    address,
    block_of,
    check_same,
    group_threads,
    nothing,
    row_count,
    row_stride,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.plan import DensePlan
from rtkernels.runtime.targets import Target

_UNIT = "norm/rms_norm.cu"
_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_REGISTER_THREADS, _REGISTER_CHUNKS = 512, (1, 2, 4)
_RING_THREADS, _RING_CHUNKS = 512, (1, 2)
_HELPED = 16  # rows of a group: 1024x4096 14.2 µs with a warp that fetches, 14.7 without; 8192x4096 55.7 and 55.1
_IN_FLIGHT = 64 << 10  # bytes asked of the copy engine: 4096 columns 56.0 µs, 60.9 with 48 KB, 56.8 with 128 KB


_LONG_VARIANTS = [(t,) for t in _WIDTH]


def _ring_stages(limit: int, chunks: int, dsum: bool) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes.

    Two are best where a thread holds much of a row (measured: 104.8 µs against 107.3 with four at 8192x8192).
    """
    per_stage = _ring_block(chunks) * 16 * chunks * (3 if dsum else 2)
    return min(4 if chunks == 1 else 2, (limit - 2048) // per_stage)


def _ring_block(chunks: int) -> int:
    """Return the most threads a block of the ring kernel may have: fewer where a thread holds more of the row."""
    return 768 if chunks == 1 else _RING_THREADS


def _ring_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    # Where there is a copy engine, only rows shorter than a warp come this way.
    for t, chunks, dsum in product(_WIDTH, (1,) if "tma" in target.features else _RING_CHUNKS, (False, True)):
        stages = _ring_stages(shared_limit(target), chunks, dsum)
        if stages >= 2:
            yield t, chunks, dsum, stages


_FWD_ARGS = (
    "x:ptr residual:ptr weight:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 {wide}eps:f64 offset:f64"
)
_BWD_ARGS = (
    "dy:ptr h:ptr weight:ptr dsum:ptr dh:ptr {last}:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 "
    "dsum_stride:i64 threads_per_row:i64 {wide}:i64 eps:f64 offset:f64"
)
_FWD = Kernel(
    _UNIT,
    "rms_norm_fwd",
    template="T W VEC CHUNKS RESIDUAL",
    args=_FWD_ARGS.format(wide=""),
    variants=[(t, w, _WIDTH[t], c, r) for t, w in _TYPES for c in _REGISTER_CHUNKS for r in (False, True)],
    max_registers=96,
)
_FWD_LONG = Kernel(
    _UNIT,
    "rms_norm_fwd_long",
    template="T",
    args=_FWD_ARGS.format(wide="flags:i64 "),
    variants=_LONG_VARIANTS,
    max_registers=64,
)
_BWD = Kernel(
    _UNIT,
    "rms_norm_bwd",
    template="T CHUNKS DSUM STAGES",
    args=_BWD_ARGS.format(last="partial", wide="wide"),
    variants=_ring_variants,
    max_registers=128,
)
_BWD_BULK = Kernel(
    "norm/rms_norm_bwd_bulk.cu",
    "rms_norm_bwd_bulk",
    template="T CHUNKS DSUM",
    args=_BWD_ARGS.format(last="partial", wide="wide") + " stages:i64 groups:i64",
    variants=list(product(_WIDTH, _RING_CHUNKS, (False, True))),
    max_registers=112,
    needs=("tma",),
)
_BWD_LONG = Kernel(
    _UNIT,
    "rms_norm_bwd_long",
    template="T",
    args=_BWD_ARGS.format(last="rstd", wide="flags"),
    variants=_LONG_VARIANTS,
    max_registers=64,
)
_BWD_WEIGHT = Kernel(
    _UNIT,
    "rms_norm_bwd_weight",
    template="T",
    args="dy:ptr h:ptr rstd:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 aligned16:i64",
    variants=_LONG_VARIANTS,
    max_registers=64,
)


# ---- validation and planning: plain metadata in, a bound launch out -------------------------------------------------


def check_weight(shape: torch.Size, weight_device: int, cols: int, device: int) -> None:
    if tuple(shape) != (cols,):
        raise ArgumentError(f"weight has shape {tuple(shape)}; expected ({cols},), the last dimension of x")
    check_same("weight", weight_device, device, "device")


def _long_flags(vec: int, t: str, w: str) -> int:
    """Return the flags of the kernels for long rows: 1 for a weight wider than x, 2 for 16-byte accesses."""
    return int(w != t) | int(vec == _WIDTH[t]) << 1


class ForwardPlan(DensePlan):
    """Its launch takes x, residual, weight, y and sum."""

    __slots__ = ()

    def run(self, x: int, weight: int) -> Tensor:
        y = self.allocate(*self.layout)
        if self.launch is not None:
            self.launch(x, 0, weight, y.data_ptr(), 0)
        return y


def _plan_fwd(
    dtype, shape, stride, device, w_dtype, w_shape, w_dense: bool, w_device, residual, align: int, eps: float,
    offset: float,
) -> ForwardPlan | None:  # fmt: skip
    """Return a plan, None if an input must be copied first.

    `stride` is None for a contiguous x; `residual` is None or its metadata.
    """
    t = token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    rows, cols = row_count(shape), shape[-1]
    x_stride, residual_stride = row_stride(shape, stride or dense_strides(shape)), 0
    w = t
    if w_dtype is not None:
        w = token("weight", w_dtype, (dtype, torch.float32))
        check_weight(w_shape, w_device, cols, device)
    if residual is not None:
        check_same("residual", residual[0], dtype, "dtype")
        check_same("residual", residual[1], shape, "shape")
        check_same("residual", residual[3], device, "device")
        residual_stride = row_stride(residual[1], residual[2])
    memory = dense_memory(device, shape, dtype)
    if rows == 0 or cols == 0:
        return ForwardPlan(None, *memory)
    if x_stride is None or residual_stride is None or not w_dense:
        return None
    size = dtype.itemsize
    vec = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) // size
    has_residual = residual is not None
    vectors = cols // vec
    if vec == _WIDTH[t] and vectors <= _REGISTER_THREADS * max(_REGISTER_CHUNKS):
        chunks = 1 if vectors <= 64 else 2 if vectors <= 128 else 4
        threads = group_threads(-(-vectors // chunks), _REGISTER_THREADS)
        kernel, variant, wide = _FWD, (t, w, vec, chunks, has_residual), ()
    else:
        vec = vec if vec == _WIDTH[t] else 1
        threads = group_threads(-(-cols // vec), 1024)
        kernel, variant, wide = _FWD_LONG, (t,), (_long_flags(vec, t, w),)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), GRID_LIMIT)
    ending = (rows, cols, x_stride, residual_stride, threads, *wide, eps, offset)
    return ForwardPlan(kernel.bind(variant, device, grid, block, ending=ending), *memory)


FWD_PLANS = Plans(_plan_fwd)


class _BackwardPlan:
    """The launches of one backward call and the workspace they need."""

    def __init__(self, dy, h, weight, dsum, align: int, weight_grad: bool) -> None:
        dtype, shape, _, device = h
        t = token("h", dtype)
        w = t if weight is None else token("weight", weight[0], (dtype, torch.float32))
        info = device_info(device)
        size, rows, cols = dtype.itemsize, row_count(shape), shape[-1]
        strides = [row_stride(*m[1:3]) for m in (dy, h)] + [0 if dsum is None else row_stride(*dsum[1:3])]
        vec = vector_bytes(align, cols * size, *(s * size for s in strides)) // size
        vectors = cols // vec
        chunks = next((c for c in _RING_CHUNKS if vectors <= _RING_THREADS * c), _RING_CHUNKS[-1])
        stages = _ring_stages(info.shared_per_block, chunks, dsum is not None)
        self.cols, self.device, self.weight_grad, self.partial_launch = cols, device, weight_grad, None
        self.tail: tuple[int, ...] = ()
        self.early = True  # column_sum finds room beside the kernel
        fits = vec == _WIDTH[t] and vectors <= _RING_THREADS * chunks
        inputs, most = 2 if dsum is None else 3, _ring_block(chunks)
        wide = int(w != t)
        near, few = max(strides) < 2**30, _HELPED if chunks == 1 else 0
        if fits and near and (r := bulk_ring(info, rows, vectors, chunks, inputs, most, _IN_FLIGHT, few)):
            self.early = False
            threads, self.partial_rows, self.tail = r.threads, r.blocks, (r.stages, r.groups)
            self.launch = _BWD_BULK.bind((t, chunks, dsum is not None), device, r.blocks, r.block, r.shared)
        elif fits and stages >= 2:
            threads = group_threads(-(-vectors // chunks), _RING_THREADS)
            most = _ring_block(chunks) // threads if threads <= 32 else min(_ring_block(chunks) // threads, 15)
            groups = max(1, min(most, rows // info.sm_count))
            groups += -groups % (32 // min(threads, 32))  # whole warps
            shared = stages * groups * threads * 16 * chunks * inputs
            grid = self.partial_rows = min(info.sm_count, -(-rows // groups))
            variant = (t, chunks, dsum is not None, stages)
            self.launch = _BWD.bind(variant, device, grid, groups * threads, shared)
        else:
            vec = vec if vec == _WIDTH[t] else 1
            threads = group_threads(-(-cols // vec), 1024)
            block = block_of(threads)
            grid = min(-(-rows // (block // threads)), GRID_LIMIT)
            self.launch = _BWD_LONG.bind((t,), device, grid, block)
            wide = _long_flags(vec, t, w)
            if weight_grad:
                column_blocks = -(-cols // (256 * vec))
                self.partial_rows = min(max(1, 4 * info.sm_count // column_blocks), rows, 65535)
                self.partial_launch = _BWD_WEIGHT.bind((t,), device, (column_blocks, self.partial_rows), 256)
                self.partial_args = (rows, cols, *strides[:2], int(vec > 1))
        self.rows = rows
        self.args = (rows, cols, *strides, threads, wide)

    def run(
        self,
        dy: Tensor,
        h: Tensor,
        weight: Tensor | None,
        dsum: Tensor | None,
        eps: float,
        offset: float,
        over: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return dh, which is h itself if `over` and no second kernel reads h, and dweight."""
        dh = h if over and self.partial_launch is None else torch.empty(h.shape, dtype=h.dtype, device=h.device)
        inputs = (dy.data_ptr(), h.data_ptr(), address(weight), address(dsum))
        if not self.weight_grad:
            self.launch(*inputs, dh.data_ptr(), 0, *self.args, eps, offset, *self.tail)
            return dh, nothing(h)
        partial = torch.empty(self.partial_rows, self.cols, dtype=torch.float32, device=h.device)
        if self.partial_launch is None:
            self.launch(*inputs, dh.data_ptr(), partial.data_ptr(), *self.args, eps, offset, *self.tail)
        else:
            rstd = torch.empty(self.rows, dtype=torch.float32, device=h.device)
            self.launch(*inputs, dh.data_ptr(), rstd.data_ptr(), *self.args, eps, offset, *self.tail)
            self.partial_launch(*inputs[:2], rstd.data_ptr(), partial.data_ptr(), *self.partial_args)
        return dh, column_sum(partial, weight.dtype, beside=self.early)


BWD_PLANS = Plans(_BackwardPlan)

KERNELS = (_FWD, _FWD_LONG, _BWD, _BWD_BULK, _BWD_LONG, _BWD_WEIGHT)
