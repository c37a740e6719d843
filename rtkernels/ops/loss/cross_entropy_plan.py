"""The kernels of cross entropy, which one runs how for which tensors, and the report of bad labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    block_of,
    check_same,
    divisor,
    group_threads,
    passing,
    row_count,
    row_stride,
    token,
)
from rtkernels.runtime.operator.arguments import a_number

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
NONE, MEAN, SUM = 0, 1, 2

_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_TYPES = [(t,) for t in _WIDTH]
_FORWARD_THREADS, _BACKWARD_THREADS, _SHORT_THREADS, _CHUNKS = 256, 128, 256, 4
# cross_entropy_fwd: pieces that a thread requests at once, and how often at least, if that leaves something to do for
# 1024 threads of every multiprocessor.
_FORWARD_BATCH, _FORWARD_BATCHES = 4, 4
# cross_entropy_grad_long: the fewest slots (pieces of a row that a thread has in shared memory), how many pieces L2 is
# asked ahead, registers of a thread, warps of a block at least (128 bytes and a piece of single columns have a thread
# each), static shared memory.
_LEAST, _AHEAD, _LONG_REGISTERS, _LEAST_WARPS, _STATIC_SHARED = 4, 2, 96, 3, 1552
_FINE = 1.15  # rounds of rows, of which the last is partly empty, over full ones, from which rows are cut in two
# cross_entropy_few: pieces of a thread; warps of a multiprocessor, for which it has registers, and how many of them
# clusters fill; threads of a block at least, if a row has several blocks; blocks of a row.
_FEW_CHUNKS, _FEW_WARPS, _FEW_CLUSTERED_WARPS, _FEW_LEAST, _FEW_BLOCKS = 5, 28, 24, 96, 8
_FEW_FORWARD = 512 * _FEW_CHUNKS  # pieces of a row up to which cross_entropy_fwd is as fast
_REDUCE_ROWS = 1024  # of a block of cross_entropy_reduce, if there are several
_REDUCE_ALONE = 8192  # rows that one block takes alone

FWD = Kernel(
    "loss/cross_entropy.cu",
    "cross_entropy_fwd",
    template="T",
    args="x:ptr labels:ptr loss:ptr stats:ptr correct:ptr report:ptr rows:i64 cols:i64 x_stride:i64 wide:i64 "
    "ignore_index:i64 first:i64 vocabulary:i64 threads_per_row:i64 passing:i64 smoothing:f64 z_loss:f64 per_column:f64 "
    "softcap:f64",
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
    "x:ptr dx:ptr labels:ptr loss:ptr stats:ptr correct:ptr {} report:ptr rows:i64 cols:i64 x_stride:i64 dx_stride:i64 "
    "wide:i64 ignore_index:i64 {} smoothing:f64 z_loss:f64 per_column:f64"
)
GRAD_SHORT = Kernel(
    "loss/cross_entropy_grad.cu",
    "cross_entropy_grad_short",
    template="T",
    args=_GRAD_ARGS.format("factor:ptr", "threads_per_row:i64"),
    variants=_TYPES,
    max_registers=64,
)
GRAD_LONG = Kernel(
    "loss/cross_entropy_grad.cu",
    "cross_entropy_grad_long",
    template="T",
    args=_GRAD_ARGS.format("factor:ptr", "drawn:ptr slots:i64 turn:i64 blocks:i64 team_threads:i64 teams:i64"),
    variants=_TYPES,
    max_registers=_LONG_REGISTERS,
)
FEW = Kernel(
    "loss/cross_entropy_few.cu",
    "cross_entropy_few",
    template="T",
    args=_GRAD_ARGS.format("out:ptr accuracy:ptr factor:ptr arrived:ptr", "kind:i64 blocks:i64 threads:i64"),
    variants=_TYPES,
    max_registers=72,
)
KERNELS = (FWD, BWD, REDUCE, SCALE, GRAD_SHORT, GRAD_LONG, FEW)


# ---- bad labels: kernels write what they find into host memory, which costs no synchronisation to look at -----------


class _Report:
    """Where kernels on one device report a label outside the vocabulary: found, label, row."""

    def __init__(self, device: int) -> None:
        self.tensor = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device >= 0)
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
    if not 0.0 <= a_number("label_smoothing", label_smoothing) <= 1.0:
        raise ArgumentError(f"label_smoothing is {label_smoothing}; expected 0 to 1")
    if not abs(a_number("z_loss", z_loss)) < float("inf"):
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


class RowsPlan(NamedTuple):
    """How a kernel runs that can write results and gradient at once."""

    launch: Launch | None  # None if there are no rows
    few: bool  # cross_entropy_few, which also sums over the rows
    drawn: bool  # needs a counter of rows
    sizes: tuple[int, ...]  # its last integers


class ForwardPlan(NamedTuple):
    """How cross_entropy_fwd runs."""

    launch: Launch | None  # None if there are no rows
    shape: tuple[int, int, int, int]  # rows, cols, x_stride, wide
    how: tuple[int, int]  # threads of a row, whether its data passes L2


def _plan_fwd(logits: Meta, labels: Meta, reduction: int | None) -> ForwardPlan | RowsPlan:
    """Plan a forward pass; `reduction` is None with a cap or a part of the vocabulary: not for cross_entropy_few."""
    check(logits, labels)
    t, rows, cols, stride, device = _shape(logits)
    shape, vectors = (rows, cols, stride, int(labels[0] == torch.int64)), cols // _WIDTH[t]
    if not rows:
        return ForwardPlan(None, shape, (0, 0))
    if reduction is not None and (few := _plan_few(logits, _FEW_FORWARD, reduction != NONE)):
        return few
    info = device_info(device)
    most = 512 if rows <= 2 * info.sm_count else _FORWARD_THREADS  # one block for each half multiprocessor, or less
    least = min(_FORWARD_BATCHES, rows * vectors // (1024 * info.sm_count * _FORWARD_BATCH))
    batches = max(1, least, -(-vectors // (most * _FORWARD_BATCH)))  # a part of a batch takes as long as a whole one
    threads = _group(vectors, most, batches * _FORWARD_BATCH)
    how = threads, int(passing(rows * cols * logits[0].itemsize))
    return ForwardPlan(FWD.bind((t,), device, *_grid(rows, threads)), shape, how)


def _plan_bwd(logits: Meta, labels: Meta):
    check(logits, labels)
    t, rows, cols, stride, device = _shape(logits)
    vectors = cols // _WIDTH[t]
    threads = _group(vectors, _BACKWARD_THREADS)
    segments = max(1, -(-vectors // (threads * _CHUNKS)))
    launch = BWD.bind((t,), device, *_grid(rows, threads, segments)) if rows else None
    return launch, rows, cols, stride, int(labels[0] == torch.int64), threads, segments, divisor(segments)


def _clusters(device: int) -> bool:
    return device >= 0 and "cluster" in device_info(device).target.features


def few_threads(vectors: int, blocks: int) -> int:
    """Return how many threads each block of cross_entropy_few has if several share a row of `vectors` pieces."""
    return max(32, -(-vectors // (blocks * _FEW_CHUNKS * 32)) * 32)


def few_blocks(vectors: int, rows: int, device: int, short: int, sums: bool) -> int:
    """Return how many blocks of cross_entropy_few share a row of `vectors` pieces; 0 if other kernels are better.

    They are if not all rows run at once, and for rows of up to `short` pieces unless few of them are to be summed up.
    """
    multiprocessors = device_info(device).sm_count
    if rows > 2 * multiprocessors or (vectors <= short and not (sums and 2 * rows <= multiprocessors)):
        return 0
    blocks = _FEW_BLOCKS if _clusters(device) else 1
    while blocks:
        warps = few_threads(vectors, blocks) // 32
        at_once = max(1, (_FEW_WARPS if blocks == 1 else _FEW_CLUSTERED_WARPS) // warps) * multiprocessors
        work = blocks == 1 or vectors >= blocks * _FEW_LEAST * _FEW_CHUNKS
        if work and warps <= _FEW_WARPS and rows * blocks <= at_once:
            break
        blocks //= 2
    return blocks


class LongLayout(NamedTuple):
    """How cross_entropy_grad_long runs."""

    grid: int
    threads: int
    shared: int
    slots: int
    blocks: int  # of a row
    held: int  # pieces of a row that a thread has in registers


def long_layout(vectors: int, rows: int, device: int) -> LongLayout:
    """Return the layout for rows of `vectors` pieces.

    As many blocks on a multiprocessor as hold a row each, unless there are fewer rows; its registers are in four parts,
    and a warp's are in one. A row is held by two multiprocessors if it is too long for one or if half of them would
    have none; it is cut in two, for two blocks on each, if few rounds end with a nearly empty one.
    """
    info = device_info(device)
    held = 6 if info.target.capability >= (10, 0) else 9  # kLongHeld
    warps = 4 * (16384 // (_LONG_REGISTERS * 32))

    def threads_of(blocks: int) -> int:
        return warps // blocks * 32

    def slots_of(threads: int) -> int:
        return max(_LEAST, -(-(-(-vectors // threads) - held) // 2) * 2)

    def room(blocks: int) -> int:
        free = (info.shared_per_block + 1024) // blocks - 1024 - _STATIC_SHARED
        return free // (threads_of(blocks) * 16) // 2 * 2

    def filled(threads: int) -> bool:  # no register without a piece
        return vectors >= (held + 1) * threads

    counts = range(1, warps // _LEAST_WARPS + 1)
    most = max((b for b in counts if slots_of(threads_of(b)) <= room(b)), default=0)
    wanted = max(-(-rows // info.sm_count), next(b for b in counts if filled(threads_of(b)) or b == counts[-1]))
    blocks, team = max(1, min(most, wanted)), 1
    if _clusters(device):
        rounds = -(-rows // info.sm_count)
        if most == 0 or (blocks == 1 and 2 * rows <= info.sm_count and filled(2 * threads_of(1))):
            team = 2
        elif most == 1 and rows > info.sm_count and rounds * info.sm_count > _FINE * rows:
            blocks = team = 2
    threads = threads_of(blocks)
    slots = min(slots_of(team * threads), room(blocks))
    grid = min(rows, info.sm_count * blocks // team) * team
    return LongLayout(grid, threads, slots * threads * 16, slots, team, held)


def _plan_few(logits: Meta, short: int, sums: bool) -> RowsPlan | None:
    """Plan cross_entropy_few, if it is the best for these rows."""
    t, rows, cols, _, device = _shape(logits)
    vectors = cols // _WIDTH[t]
    blocks = few_blocks(vectors, rows, device, short, sums)
    if not blocks:
        return None
    threads = few_threads(vectors, blocks)
    launch = FEW.bind((t,), device, rows * blocks, threads, cluster=blocks)
    return RowsPlan(launch, True, False, (blocks, blocks * threads))


def _plan_rows(logits: Meta, labels: Meta, reduction: int | None) -> RowsPlan:
    """Plan a kernel of one pass; `reduction` is None if a factor is given, which cross_entropy_few does not take."""
    check(logits, labels)
    t, rows, cols, _, device = _shape(logits)
    vectors, short, overlap = cols // _WIDTH[t], _SHORT_THREADS * _CHUNKS, reduction == MEAN
    if not rows:
        return RowsPlan(None, False, False, ())
    if reduction is not None and (few := _plan_few(logits, short, reduction != NONE)):
        return few
    if vectors <= short:
        threads = _group(vectors, _SHORT_THREADS)
        launch = GRAD_SHORT.bind((t,), device, *_grid(rows, threads), overlap=overlap)
        return RowsPlan(launch, False, False, (threads,))
    grid, threads, shared, slots, blocks, held = long_layout(vectors, rows, device)
    turn = (-(-vectors // (threads * blocks)) - _AHEAD - held + 1) // 2 * 2
    launch = GRAD_LONG.bind((t,), device, grid, threads, shared, overlap=overlap, cluster=blocks)
    return RowsPlan(launch, False, True, (slots, turn, blocks, threads * blocks, grid // blocks))


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
    return (SCALE.bind((t,), device, grid, block, overlap=True) if rows and cols else None), rows, cols, stride, threads


FWD_PLANS, BWD_PLANS, ROWS_PLANS = Plans(_plan_fwd), Plans(_plan_bwd), Plans(_plan_rows)
REDUCE_PLANS, SCALE_PLANS = Plans(_plan_reduce), Plans(_plan_scale)


def aligned(x: Tensor) -> Tensor:
    """Return logits whose rows have the alignment of a dense tensor's rows: as they are, or a copy."""
    stride = row_stride(x.shape, x.stride())
    if stride is not None and x.data_ptr() % 16 == 0 and (stride - x.shape[-1]) * x.element_size() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
