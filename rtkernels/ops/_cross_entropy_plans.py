"""The kernels of cross entropy, which one runs how for which tensors, and the report of bad labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels._kernel import Kernel, Plans, device_info
from rtkernels._layout import GRID_LIMIT, block_of, check_same, divisor, group_threads, row_count, row_stride, token
from rtkernels.errors import ArgumentError

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
NONE, MEAN, SUM = 0, 1, 2

_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_TYPES = [(t,) for t in _WIDTH]
_FORWARD_THREADS, _BACKWARD_THREADS, _SHORT_THREADS, _CHUNKS = 256, 128, 512, 4
_FORWARD_BATCH = 6  # kForwardBatch
# cross_entropy_grad_long: pieces of a row that a thread has in registers, the fewest in shared memory, registers of a
# thread, warps of a block at least (128 bytes and a piece of single columns have a thread each).
_HELD, _LEAST, _LONG_REGISTERS, _LEAST_WARPS = 9, 4, 96, 3
_STATIC_SHARED = 1040
_SHORT_FORWARD = 256  # pieces of a row up to which cross_entropy_grad_short is faster than cross_entropy_fwd
_REDUCE_ROWS = 4096  # of a block of cross_entropy_reduce, if there are several
_REDUCE_ALONE = 16384  # rows that one block takes alone

FWD = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_fwd",
    template="T",
    args="x:ptr labels:ptr loss:ptr stats:ptr correct:ptr report:ptr rows:i64 cols:i64 x_stride:i64 wide:i64 "
    "ignore_index:i64 first:i64 vocabulary:i64 threads_per_row:i64 smoothing:f64 z_loss:f64 per_column:f64 softcap:f64",
    variants=_TYPES,
    max_registers=64,
)
BWD = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_bwd",
    template="T",
    args="dloss:ptr x:ptr dx:ptr labels:ptr stats:ptr factor:ptr report:ptr rows:i64 cols:i64 x_stride:i64 "
    "dx_stride:i64 dloss_stride:i64 wide:i64 ignore_index:i64 first:i64 vocabulary:i64 threads_per_row:i64 "
    "segments:i64 by_segments:i64 smoothing:f64 z_loss:f64 per_column:f64 softcap:f64",
    variants=_TYPES,
    max_registers=64,
)
REDUCE = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_reduce",
    template="T",
    args="loss:ptr correct:ptr labels:ptr out:ptr accuracy:ptr factor:ptr parts:ptr rows:i64 wide:i64 "
    "ignore_index:i64 mean:i64",
    variants=[("fp32",)],
    max_registers=64,
)
SCALE = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_scale",
    template="T",
    args="x:ptr dloss:ptr rows:i64 cols:i64 x_stride:i64 dloss_stride:i64 threads_per_row:i64",
    variants=_TYPES,
    max_registers=96,
)
_GRAD_ARGS = (
    "x:ptr dx:ptr labels:ptr loss:ptr stats:ptr correct:ptr factor:ptr report:ptr rows:i64 cols:i64 x_stride:i64 "
    "dx_stride:i64 wide:i64 ignore_index:i64 {}:i64 smoothing:f64 z_loss:f64 per_column:f64"
)
GRAD_SHORT = Kernel(
    "loss/cross_entropy_grad.cu",
    "cross_entropy_grad_short",
    template="T",
    args=_GRAD_ARGS.format("threads_per_row"),
    variants=_TYPES,
    max_registers=64,
)
GRAD_LONG = Kernel(
    "loss/cross_entropy_grad.cu",
    "cross_entropy_grad_long",
    template="T",
    args=_GRAD_ARGS.format("slots"),
    variants=_TYPES,
    max_registers=_LONG_REGISTERS,
)
KERNELS = (FWD, BWD, REDUCE, SCALE, GRAD_SHORT, GRAD_LONG)


# ---- bad labels: kernels write what they find into host memory, which costs no synchronisation to look at -----------


class _Report:
    """Where kernels on one device report a label outside the vocabulary: found, label, row."""

    def __init__(self, device: int) -> None:
        self.tensor = torch.zeros(3, dtype=torch.int64, pin_memory=device >= 0)
        self._values = self.tensor.numpy()

    def raise_if_bad(self) -> None:
        values = self._values
        if values[0]:
            label, row = int(values[1]), int(values[2])
            values[0] = 0
            raise ArgumentError(
                f"labels has {label} in row {row} of the flattened labels, which is neither a column of the vocabulary "
                f"nor ignore_index (on a GPU this is about an earlier call)"
            )


_REPORTS: dict[int, _Report] = {}


def report(device: int) -> _Report:
    """Return the report of a device, CUDA ordinal or -1."""
    found = _REPORTS.get(device)
    if found is None:
        found = _REPORTS[device] = _Report(device)
    return found


def raise_pending(device: int | None = None) -> None:
    """Raise an ArgumentError if a finished kernel has reported a bad label, on one device or on any."""
    for number, found in list(_REPORTS.items()):
        if device is None or number == device:
            found.raise_if_bad()


# ---- validation -----------------------------------------------------------------------------------------------------

Meta = tuple[Any, ...]


def check(logits: Meta, labels: Meta, name: str = "logits") -> None:
    """Raise an ArgumentError for tensors that do not fit together."""
    dtype, shape, _, device = logits
    token(name, dtype)
    if not shape:
        raise ArgumentError(f"{name} has no dimensions; expected [..., vocabulary]")
    if labels[0] not in (torch.int32, torch.int64):
        raise ArgumentError(f"labels has dtype {str(labels[0]).removeprefix('torch.')}; expected one of int32, int64")
    if tuple(labels[1]) != tuple(shape[:-1]):
        raise ArgumentError(
            f"labels has shape {tuple(labels[1])}; expected {tuple(shape[:-1])}, that of {name} without its last one"
        )
    check_same("labels", labels[3], device, "device index", of=name)
    if not 0 < shape[-1] < 2**31:
        raise ArgumentError(f"{name} has {shape[-1]} columns; expected 1 to 2^31 - 1")


def check_options(label_smoothing: float, z_loss: float, softcap: float, reduction: int) -> None:
    """Raise an ArgumentError for numbers that make no loss."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"label_smoothing is {label_smoothing}; expected 0 to 1")
    if not abs(z_loss) < float("inf"):
        raise ArgumentError(f"z_loss is {z_loss}; expected a finite number")
    if not 0.0 <= softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap}; expected a positive number, or None")
    if reduction not in (NONE, MEAN, SUM):
        raise ArgumentError(f"reduction is {reduction}; expected 0 (none), 1 (mean) or 2 (sum)")


# ---- planning: plain metadata in, a bound launch out ----------------------------------------------------------------


def _group(vectors: int, most: int, each: int = _CHUNKS) -> int:
    """Threads of a row, with `each` pieces or more: at least 16, so that each column beside the vectors has one."""
    return max(16, group_threads(-(-vectors // each), most))


def _grid(rows: int, threads: int, segments: int = 1) -> tuple[int, int]:
    block = block_of(threads)
    grid = -(-rows // (block // threads)) * segments
    if grid > GRID_LIMIT:
        raise ArgumentError(f"logits has {rows} rows, more than one launch can take")
    return grid, block


def _shape(logits: Meta) -> tuple[str, int, int, int, int]:
    dtype, shape, stride, device = logits
    return token("logits", dtype), row_count(shape), shape[-1], row_stride(shape, stride), device


def _plan_fwd(logits: Meta, labels: Meta):
    """Return ``(launch, rows, cols, x_stride, wide, threads)``; rows without launch if there are none."""
    check(logits, labels)
    t, rows, cols, stride, device = _shape(logits)
    wide = int(labels[0] == torch.int64)
    if not rows:
        return None, rows, cols, stride, wide, 0
    few = rows <= 2 * device_info(device).sm_count  # no more than a block of 512 threads for each half multiprocessor
    most, vectors = 512 if few else _FORWARD_THREADS, cols // _WIDTH[t]
    batches = max(1, -(-vectors // (most * _FORWARD_BATCH)))  # a part of a batch takes as long as a whole one
    threads = _group(vectors, most, batches * _FORWARD_BATCH)
    grid, block = _grid(rows, threads)
    launch = FWD.bind((t,), device, grid, block)
    return launch, rows, cols, stride, wide, threads


def _plan_bwd(logits: Meta, labels: Meta):
    check(logits, labels)
    t, rows, cols, stride, device = _shape(logits)
    vectors = cols // _WIDTH[t]
    threads = _group(vectors, _BACKWARD_THREADS)
    segments = max(1, -(-vectors // (threads * _CHUNKS)))
    launch = BWD.bind((t,), device, *_grid(rows, threads, segments)) if rows else None
    return launch, rows, cols, stride, int(labels[0] == torch.int64), threads, segments, divisor(segments)


def long_layout(vectors: int, rows: int, device: int) -> tuple[int, int, int, int]:
    """Return grid, threads, slots and shared bytes of cross_entropy_grad_long for rows of `vectors` pieces.

    As many blocks on a multiprocessor as hold a row each. Its registers are in four parts, and a warp's are in one.
    """
    info = device_info(device)
    warps = 4 * (16384 // (_LONG_REGISTERS * 32))
    for blocks in range(warps // _LEAST_WARPS, 0, -1):
        threads = warps // blocks * 32
        slots = max(_LEAST, -(-(-(-vectors // threads) - _HELD) // 2) * 2)
        room = (info.shared_per_block + 1024) // blocks - 1024 - _STATIC_SHARED
        if slots * threads * 16 <= room:
            break
    else:
        slots = room // (threads * 16) // 2 * 2
    return min(rows, info.sm_count * blocks), threads, slots, slots * threads * 16


def short_forward(dtype: torch.dtype, cols: int) -> bool:
    """Return whether cross_entropy_grad_short is the kernel for the forward pass, too."""
    return cols // _WIDTH[token("logits", dtype)] <= _SHORT_FORWARD


def _plan_grad(logits: Meta, labels: Meta, overlap: bool):
    """Return ``(launch, rows, cols, x_stride, wide, threads or slots)``."""
    check(logits, labels)
    t, rows, cols, stride, device = _shape(logits)
    vectors, wide = cols // _WIDTH[t], int(labels[0] == torch.int64)
    if not rows:
        return None, rows, cols, stride, wide, 0
    if vectors <= _SHORT_THREADS * _CHUNKS:
        threads = _group(vectors, _SHORT_THREADS)
        launch = GRAD_SHORT.bind((t,), device, *_grid(rows, threads), overlap=overlap)
        return launch, rows, cols, stride, wide, threads
    grid, threads, slots, shared = long_layout(vectors, rows, device)
    launch = GRAD_LONG.bind((t,), device, grid, threads, shared, overlap=overlap)
    return launch, rows, cols, stride, wide, slots


def reduce_blocks(rows: int) -> int:
    """Return how many blocks of cross_entropy_reduce work on that many rows."""
    return 1 if rows <= _REDUCE_ALONE else min(-(-rows // _REDUCE_ROWS), 1024)


def _plan_reduce(device: int, overlap: bool, blocks: int):
    return REDUCE.bind(("fp32",), device, blocks, 1024, overlap=overlap)


def _plan_scale(x: Meta):
    t, rows, cols, stride, device = _shape(x)
    threads = _group(cols // _WIDTH[t], _BACKWARD_THREADS)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), 8 * device_info(device).sm_count)
    return (SCALE.bind((t,), device, grid, block) if rows and cols else None), rows, cols, stride, threads


FWD_PLANS, BWD_PLANS, GRAD_PLANS = Plans(_plan_fwd), Plans(_plan_bwd), Plans(_plan_grad)
REDUCE_PLANS, SCALE_PLANS = Plans(_plan_reduce), Plans(_plan_scale)


def aligned(x: Tensor) -> Tensor:
    """Return logits whose rows have the alignment of a dense tensor's rows: as they are, or a copy."""
    stride = row_stride(x.shape, x.stride())
    if stride is not None and x.data_ptr() % 16 == 0 and (stride - x.shape[-1]) * x.element_size() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
