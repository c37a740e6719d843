"""How rms_norm is launched: kernel records, and from tensor metadata to a bound launch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.checks import check_gradients, check_inputs
from rtkernels.ops.shared.bulk_ring import bulk_ring, copy_ring
from rtkernels.ops.shared.column_sum import column_sum_step, parts_grid
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES, WEIGHTED_TYPES, WIDTH, group_threads, row_blocks, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

_UNIT = "norm/rms_norm.cu"
_REGISTER_THREADS = 512
_REGISTER_CHUNKS = (1, 2, 4)
_RING_THREADS = 512
_RING_CHUNKS = (1, 2)
_BULK_CHUNKS = (1, 2, 4)  # likewise where TMA loads the rows
_HELPED_ROWS = 16  # of a group, up to which a warp that only fetches pays (decisions/norm.md, helpers)
_IN_FLIGHT = {1: 64 << 10, 2: 64 << 10, 4: 160 << 10}  # bytes of the ring (decisions/norm.md, bytes in flight)


def _ring_stages(limit: int, chunks: int, dsum: bool) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes.

    Two are best where a thread has much of a row (decisions/norm.md, stages).
    """
    per_stage = _ring_block(chunks) * 16 * chunks * (3 if dsum else 2)
    return min(4 if chunks == 1 else 2, (limit - 2048) // per_stage)


def _ring_block(chunks: int) -> int:
    """Return the most threads a block of the ring kernel may have: fewer where a thread holds more of the row."""
    return 768 if chunks == 1 else _RING_THREADS


def _ring_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    # With TMA, only rows shorter than a warp get here.
    for t, chunks, dsum in product(WIDTH, (1,) if "tma" in target.features else _RING_CHUNKS, (False, True)):
        stages = _ring_stages(shared_limit(target), chunks, dsum)
        if stages >= 2:
            yield t, chunks, dsum, stages


_FWD_ARGS = (
    "x:ptr residual:ptr weight:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 {flags}eps:f64 offset:f64"
)
_BWD_ARGS = (
    "dy:ptr h:ptr weight:ptr dsum:ptr dh:ptr {last}:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 "
    "dsum_stride:i64 threads_per_row:i64 {flags}:i64 eps:f64 offset:f64"
)
_FWD = Kernel(
    _UNIT, "rms_norm_fwd", template="T W VEC CHUNKS RESIDUAL", max_registers=96,
    args=_FWD_ARGS.format(flags=""),
    variants=[(t, w, WIDTH[t], c, r) for t, w in WEIGHTED_TYPES for c in _REGISTER_CHUNKS for r in (False, True)],
)  # fmt: skip
_FWD_LONG = Kernel(
    _UNIT, "rms_norm_fwd_long", template="T", max_registers=64,
    args=_FWD_ARGS.format(flags="flags:i64 "), variants=TYPES,
)  # fmt: skip
_BWD = Kernel(
    _UNIT, "rms_norm_bwd", template="T CHUNKS DSUM STAGES", max_registers=128,
    args=_BWD_ARGS.format(last="partial", flags="weight_fp32"), variants=_ring_variants,
)  # fmt: skip
_BWD_BULK = Kernel(
    "norm/rms_norm_bwd_bulk.cu", "rms_norm_bwd_bulk", template="T CHUNKS DSUM", max_registers=128, needs=("tma",),
    args=_BWD_ARGS.format(last="partial", flags="weight_fp32") + " stages:i64 groups:i64",
    variants=list(product(WIDTH, _BULK_CHUNKS, (False, True))),
)  # fmt: skip
_BWD_LONG = Kernel(
    _UNIT, "rms_norm_bwd_long", template="T", max_registers=64,
    args=_BWD_ARGS.format(last="rstd_out", flags="flags"), variants=TYPES,
)  # fmt: skip
_BWD_WEIGHT = Kernel(
    _UNIT, "rms_norm_bwd_weight", template="T", max_registers=64,
    args="dy:ptr h:ptr rstd:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 aligned16:i64",
    variants=TYPES,
)  # fmt: skip


def check_bwd(dy: Meta, h: Meta, weight: Meta | None, dsum: Meta | None, weight_grad: bool) -> None:
    """Raise an ArgumentError for arguments of the backward that do not fit together."""
    check_gradients(h, dy, dsum)
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")
    check_inputs(h, weight)


def _long_flags(vec: int, t: str, w: str) -> int:
    """Return the flags of the kernels for long rows: 1 for a weight wider than x, 2 for 16-byte accesses."""
    return int(w != t) | int(vec == WIDTH[t]) << 1


def plan_fwd(
    x: Meta, weight: Meta | None, eps: float, offset: float, device: int, residual: Meta | None = None,
    out: Meta | None = None,
) -> Steps:  # fmt: skip
    """Return the launch, with or without a residual, into new memory or into `out`."""
    added, total = (0, 0) if residual is None else ("residual", "sum")
    tensors = "x", added, "weight", "y" if out is None else "out", total
    t, size = x.token, x.dtype.itemsize
    w = t if weight is None else weight.token
    rows, cols, x_stride = x.rows, x.shape[-1], x.row_stride
    residual_stride = 0 if residual is None else residual.row_stride
    starts = misaligned(x, residual, weight, out)
    vec = vector_bytes(starts, cols * size, x_stride * size, residual_stride * size) // size
    vectors = cols // vec
    if vec == WIDTH[t] and vectors <= _REGISTER_THREADS * max(_REGISTER_CHUNKS):
        chunks = 1 if vectors <= 64 else 2 if vectors <= 128 else 4
        threads = group_threads(-(-vectors // chunks), _REGISTER_THREADS)
        kernel, variant, flags = _FWD, (t, w, vec, chunks, residual is not None), ()
    else:
        vec = vec if vec == WIDTH[t] else 1
        threads = group_threads(-(-cols // vec), 1024)
        kernel, variant, flags = _FWD_LONG, (t,), (_long_flags(vec, t, w),)
    launch = kernel.bind(variant, device, *row_blocks(rows, threads))
    return Steps(Step(launch, *tensors, rows, cols, x_stride, residual_stride, threads, *flags, eps, offset))


def plan_bwd(
    dy: Meta, h: Meta, weight: Meta | None, dsum: Meta | None, eps: float, offset: float, weight_grad: bool,
    device: int, dh: str = "dh",
) -> Steps:  # fmt: skip
    """Return what writes the gradient to `dh`, which may be h itself unless there is a launch after the first one."""
    t, info = h.token, device_info(device)
    w = t if weight is None else weight.token
    size, rows, cols = h.dtype.itemsize, h.rows, h.shape[-1]
    strides = [m.row_stride for m in (dy, h)]
    strides.append(0 if dsum is None else dsum.row_stride)
    vec = vector_bytes(misaligned(dy, h, weight, dsum), cols * size, *(s * size for s in strides)) // size
    vectors = cols // vec
    chunks = next((c for c in _BULK_CHUNKS if vectors <= _RING_THREADS * c), 0) if vec == WIDTH[t] else 0
    inputs, limit, flags, tail = 2 if dsum is None else 3, _ring_block(chunks), int(w != t), ()
    helped, ring = _HELPED_ROWS if chunks == 1 else 0, None
    if chunks and max(strides) < 2**30:
        ring = bulk_ring(info, rows, vectors, chunks, inputs, limit, _IN_FLIGHT[chunks], helped)
    stages = _ring_stages(info.shared_per_block, chunks, dsum is not None) if chunks in _RING_CHUNKS else 0
    overlaps, second, last = True, None, "partial" if weight_grad else 0
    if ring:
        overlaps = False  # column_sum finds no room besides the kernel
        threads, partial_rows, tail = ring.threads, ring.blocks, (ring.stages, ring.groups)
        launch = _BWD_BULK.bind((t, chunks, dsum is not None), device, ring.blocks, ring.block, ring.shared)
    elif stages >= 2:
        threads, block, partial_rows, shared = copy_ring(info, rows, vectors, chunks, inputs, limit, stages)
        launch = _BWD.bind((t, chunks, dsum is not None, stages), device, partial_rows, block, shared)
    else:
        vec = vec if vec == WIDTH[t] else 1
        threads = group_threads(-(-cols // vec), 1024)
        launch = _BWD_LONG.bind((t,), device, *row_blocks(rows, threads))
        flags, last = _long_flags(vec, t, w), "rstd" if weight_grad else 0
        if weight_grad:
            grid = parts_grid(info, rows, cols, vec)
            partial_rows, second = grid[1], _BWD_WEIGHT.bind((t,), device, grid, 256)
    sizes = rows, cols, *strides, threads, flags, eps, offset, *tail
    steps, scratch = [Step(launch, "dy", "h", "weight", "dsum", dh, last, *sizes)], {}
    if second is not None:
        scratch["rstd"] = Memory((rows,), torch.float32)
        steps.append(Step(second, "dy", "h", "rstd", "partial", rows, cols, *strides[:2], int(vec > 1)))
    if weight_grad:
        scratch["partial"] = Memory((partial_rows, cols), torch.float32)
        steps.append(column_sum_step("partial", "dweight", partial_rows, cols, weight.dtype, device, overlaps=overlaps))
    return Steps(*steps, scratch=scratch)


KERNELS = (_FWD, _FWD_LONG, _BWD, _BWD_BULK, _BWD_LONG, _BWD_WEIGHT)
