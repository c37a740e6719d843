"""The kernels of cross entropy, the choice between them, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_dtype, check_shape, token
from rtkernels.runtime.invariance import choice_rows, level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, TYPES, WIDTH, block_of, divisor, group_threads, reads_evict_first
from rtkernels.runtime.operator.arguments import Among, Within, check_number
from rtkernels.runtime.operator.declared import Argument, Meta
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
NONE, MEAN, SUM = 0, 1, 2

_FORWARD_THREADS = 256
_BACKWARD_THREADS = 128
_SHORT_THREADS = 256
_CHUNKS = 4  # vectors of a thread in the backward and in cross_entropy_grad_short
_FORWARD_BATCH = 4  # vectors that a thread of cross_entropy_fwd requests together
_FORWARD_BATCHES = 4  # batches that it gets if that leaves work for 1024 threads per SM
_MIN_SLOTS = 4  # vectors of a row that a thread of cross_entropy_grad_long has in shared memory, or more
_L2_PREFETCH = 2  # vectors before which L2 is asked (kPrefetchVectors)
_LONG_REGISTERS = 96
_MIN_WARPS = 3  # of a block: 128 bytes and a vector of single columns have a thread each
_STATIC_SHARED = 1552  # bytes
_FINE = 1.15  # rows are cut in two if rounds, counting the partly empty last one, exceed full ones by this factor
_FEW_ROWS_VECTORS = 5  # of a thread of cross_entropy_few_rows
_FEW_ROWS_WARPS = 28  # the limit that the registers of an SM set
_FEW_ROWS_CLUSTERED_WARPS = 24  # the same with clusters
_FEW_ROWS_MIN_THREADS = 96  # of a block, if a row has several blocks
_FEW_ROWS_BLOCKS = 8  # of a row
FEW_ROWS_FORWARD = 512 * _FEW_ROWS_VECTORS  # vectors of a row up to which cross_entropy_fwd is as fast
SHORT = _SHORT_THREADS * _CHUNKS  # vectors of a row up to which cross_entropy_grad_short takes it
_REDUCE_ROWS = 1024  # of a block of cross_entropy_reduce, if there are several
_REDUCE_ALONE = 8192  # rows that one block takes alone

FWD = Kernel(
    "loss/cross_entropy.cu", "cross_entropy_fwd", template="T", max_registers=64,
    args="x:ptr labels:ptr loss:ptr stats:ptr correct:ptr report:ptr rows:i64 cols:i64 x_stride:i64 labels_int64:i64 "
    "ignore_index:i64 first:i64 vocabulary:i64 threads_per_row:i64 evict_first:i64 smoothing:f64 z_loss:f64 "
    "per_column:f64 softcap:f64",
    variants=TYPES,
)  # fmt: skip
BWD = Kernel(
    "loss/cross_entropy.cu", "cross_entropy_bwd", template="T", max_registers=64,
    args="dloss:ptr x:ptr dx:ptr labels:ptr stats:ptr factor:ptr report:ptr rows:i64 cols:i64 x_stride:i64 "
    "dx_stride:i64 dloss_stride:i64 labels_int64:i64 ignore_index:i64 first:i64 vocabulary:i64 threads_per_row:i64 "
    "segments:i64 by_segments:i64 smoothing:f64 z_loss:f64 per_column:f64 softcap:f64",
    variants=TYPES,
)  # fmt: skip
REDUCE = Kernel(
    "loss/cross_entropy.cu", "cross_entropy_reduce", template="T", max_registers=64,
    args="loss:ptr correct:ptr labels:ptr out:ptr accuracy:ptr factor:ptr parts:ptr rows:i64 labels_int64:i64 "
    "ignore_index:i64 mean:i64",
    variants=[("fp32",)],
)  # fmt: skip
SCALE = Kernel(
    "loss/cross_entropy.cu", "cross_entropy_scale", template="T", max_registers=96,
    args="x:ptr dloss:ptr rows:i64 cols:i64 x_stride:i64 dloss_stride:i64 threads_per_row:i64", variants=TYPES,
)  # fmt: skip
_GRAD_ARGS = (
    "x:ptr dx:ptr labels:ptr loss:ptr stats:ptr correct:ptr {} report:ptr rows:i64 cols:i64 x_stride:i64 dx_stride:i64 "
    "labels_int64:i64 ignore_index:i64 {} smoothing:f64 z_loss:f64 per_column:f64"
)
GRAD_SHORT = Kernel(
    "loss/cross_entropy_grad.cu", "cross_entropy_grad_short", template="T", max_registers=64,
    args=_GRAD_ARGS.format("factor:ptr", "threads_per_row:i64"), variants=TYPES,
)  # fmt: skip
GRAD_LONG = Kernel(
    "loss/cross_entropy_grad.cu", "cross_entropy_grad_long", template="T", max_registers=_LONG_REGISTERS,
    args=_GRAD_ARGS.format(
        "factor:ptr", "drawn:ptr slots:i64 prefetch_switch:i64 blocks:i64 cluster_threads:i64 clusters:i64"
    ),
    variants=TYPES,
)  # fmt: skip
FEW_ROWS = Kernel(
    "loss/cross_entropy_few_rows.cu", "cross_entropy_few_rows", template="T", max_registers=72,
    args=_GRAD_ARGS.format("out:ptr accuracy:ptr factor:ptr arrived:ptr", "kind:i64 blocks:i64 threads:i64"),
    variants=TYPES,
)  # fmt: skip
KERNELS = (FWD, BWD, REDUCE, SCALE, GRAD_SHORT, GRAD_LONG, FEW_ROWS)


def check(logits: Meta, labels: Meta, name: str = "logits") -> None:
    """Raise an ArgumentError for tensors that do not fit together."""
    shape = logits.shape
    token(name, logits.dtype)
    if not shape:
        raise ArgumentError(f"{name} has no dimensions; expected [..., vocabulary]")
    check_dtype("labels", labels.dtype)
    check_shape("labels", labels.shape, shape[:-1], f"that of {name} without its last one")
    if not 0 < shape[-1] < 2**31:
        raise ArgumentError(f"{name} has {shape[-1]} columns; expected 1 to 2^31 - 1")


REDUCTION = Among(REDUCTIONS, "one of 'none', 'mean', 'sum'")
SOFTCAP = Within("float", "softcap > 0", "a positive number, or None")


def check_vocabulary(group: Any, vocab_start: int | None, vocab_size: int | None) -> None:
    """Raise an ArgumentError for a part of a vocabulary that no group shares."""
    if group is None and (vocab_start is not None or vocab_size is not None):
        raise ArgumentError("vocab_start and vocab_size are given without a group; expected both or none of them")


def refuse_group(group: Any) -> None:
    """Raise an ArgumentError for a group beside a DTensor, which has processes of its own."""
    if group is not None:
        raise ArgumentError("hidden or weight is a DTensor and a group is given; expected one of them")


def check_options(label_smoothing: float, z_loss: float, softcap: float, reduction: int) -> None:
    """Raise an ArgumentError for numbers that make no loss."""
    if not 0.0 <= check_number("label_smoothing", label_smoothing) <= 1.0:
        raise ArgumentError(f"label_smoothing is {label_smoothing}; expected 0 to 1")
    if not abs(check_number("z_loss", z_loss)) < float("inf"):
        raise ArgumentError(f"z_loss is {z_loss}; expected a finite number")
    if not 0.0 <= softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap}; expected a positive number, or None")
    if reduction not in (NONE, MEAN, SUM):
        raise ArgumentError(f"reduction is {reduction}; expected 0 (none), 1 (mean) or 2 (sum)")


def as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of a linear layer in the dtype of autocast, if that is on."""
    if hidden.device.type == "meta" or not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


# ---- planning: plain metadata in, a bound launch out ----------------------------------------------------------------


def _group(vectors: int, limit: int, each: int = _CHUNKS) -> int:
    """Threads of a row, with `each` vectors or more; 16 or more, so that each column outside of the vectors has one."""
    return max(16, group_threads(-(-vectors // each), limit))


def row_grid(rows: int, threads: int, segments: int = 1) -> tuple[int, int]:
    """Return grid and block for rows of so many threads and segments."""
    block = block_of(threads)
    grid = -(-rows // (block // threads)) * segments
    if grid > GRID_LIMIT:
        raise ArgumentError(f"logits has {rows} rows, more than one launch can take")
    return grid, block


class AlignedRows(Argument):
    """Logits whose rows have the alignment of a dense tensor's rows; others are copied."""

    def fits(self, meta: Meta) -> bool:
        stride = meta.row_stride
        if stride is None or meta.misaligned:
            return False
        return (stride - meta.shape[-1]) * meta.dtype.itemsize % 16 == 0

    def copied(self, t: Tensor) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format)


class Call(NamedTuple):
    """The rows of a call and its numbers.

    Attributes:
        logits: Of the logits.
        labels: Of the labels.
        ignore_index: The label of rows that do not count.
        numbers: Smoothing, factor of the squared log-sum-exp, smoothing of a column.
        softcap: The limit of the logits, or 0.
        device: CUDA ordinal, or -1.
        names: Of the logits, their gradient, the losses of rows, their statistics, and whether they are correct.
    """

    logits: Meta
    labels: Meta
    ignore_index: int
    numbers: tuple[float, float, float]
    softcap: float
    device: int
    names: tuple[str | int, ...]

    @property
    def t(self) -> str:
        return self.logits.token

    @property
    def rows(self) -> int:
        return self.logits.rows

    @property
    def cols(self) -> int:
        return self.logits.shape[-1]

    @property
    def stride(self) -> int:
        return self.logits.row_stride

    @property
    def labels_int64(self) -> int:
        return int(self.labels.dtype == torch.int64)

    @property
    def vectors(self) -> int:
        return self.cols // WIDTH[self.t]


def row_memory(rows: int, accuracy: bool) -> dict[str, Memory]:
    """Return scratch for the losses of rows, and for whether they are correct."""
    numbers = Memory((rows,), torch.float32)
    return {"losses": numbers, "correct": numbers} if accuracy else {"losses": numbers}


def forward_step(c: Call, first: int, vocabulary: int) -> Step:
    """Return the launch of cross_entropy_fwd for columns from `first` of a vocabulary."""
    info, vectors = device_info(c.device), c.vectors
    rows = choice_rows(c.rows)
    limit = 512 if rows <= 2 * info.sm_count else _FORWARD_THREADS  # at most two blocks per SM
    lower = min(_FORWARD_BATCHES, rows * vectors // (1024 * info.sm_count * _FORWARD_BATCH))
    batches = max(1, lower, -(-vectors // (limit * _FORWARD_BATCH)))  # a part of a batch takes as long as a whole one
    threads = _group(vectors, limit, batches * _FORWARD_BATCH)
    launch = FWD.bind((c.t,), c.device, *row_grid(c.rows, threads))
    logits, _, *results = c.names
    evict_first = int(reads_evict_first(c.rows * c.cols * c.logits.dtype.itemsize))
    sizes = c.rows, c.cols, c.stride, c.labels_int64, c.ignore_index, first, vocabulary, threads, evict_first
    return Step(launch, logits, "labels", *results, "report", *sizes, *c.numbers, c.softcap)


def backward_step(
    c: Call, dloss: str, each: bool, stats: str, factor: str | int, out_stride: int, first: int, vocabulary: int
) -> Step:
    """Return the launch of cross_entropy_bwd. `each`: dloss has a number for each row."""
    threads = _group(c.vectors, _BACKWARD_THREADS)
    segments = max(1, -(-c.vectors // (threads * _CHUNKS)))
    launch = BWD.bind((c.t,), c.device, *row_grid(c.rows, threads, segments))
    sizes = c.rows, c.cols, c.stride, out_stride, int(each), c.labels_int64, c.ignore_index, first, vocabulary
    tensors = dloss, c.names[0], c.names[1], "labels", stats, factor, "report"
    return Step(launch, *tensors, *sizes, threads, segments, divisor(segments), *c.numbers, c.softcap)


def _clusters(device: int) -> bool:
    return device >= 0 and "cluster" in device_info(device).target.features


def few_rows_threads(vectors: int, blocks: int) -> int:
    """Return how many threads each block of cross_entropy_few_rows has if several share a row of so many vectors."""
    return max(32, -(-vectors // (blocks * _FEW_ROWS_VECTORS * 32)) * 32)


def few_rows_blocks(vectors: int, rows: int, device: int, short: int, sums: bool) -> int:
    """Return how many blocks of cross_entropy_few_rows share a row of so many vectors; 0 if other kernels are better.

    They are if not all rows are resident, and for rows of up to `short` vectors unless few of them are to be summed up.
    """
    sms = device_info(device).sm_count
    if level() or rows > 2 * sms or (vectors <= short and not (sums and 2 * rows <= sms)):
        return 0
    blocks = _FEW_ROWS_BLOCKS if _clusters(device) else 1
    while blocks:
        warps = few_rows_threads(vectors, blocks) // 32
        resident = max(1, (_FEW_ROWS_WARPS if blocks == 1 else _FEW_ROWS_CLUSTERED_WARPS) // warps) * sms
        work = blocks == 1 or vectors >= blocks * _FEW_ROWS_MIN_THREADS * _FEW_ROWS_VECTORS
        if work and warps <= _FEW_ROWS_WARPS and rows * blocks <= resident:
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
    in_registers: int  # vectors of a row that a thread has in registers


def long_layout(vectors: int, rows: int, device: int) -> LongLayout:
    """Return the layout for rows of `vectors` vectors.

    An SM gets as many blocks as can each keep a row on chip, unless there are fewer rows. Its registers are in four
    parts, and a warp uses one of them. Two SMs share a row if it is too long for one, or if half of the SMs would have
    no row. A row is cut in two, with two blocks per SM, if a short series of rounds ends with a nearly empty one.
    """
    info = device_info(device)
    in_registers = 6 if info.target.capability >= (10, 0) else 9  # kLongInRegisters
    warps = 4 * (16384 // (_LONG_REGISTERS * 32))

    def threads_of(blocks: int) -> int:
        return warps // blocks * 32

    def slots_of(threads: int) -> int:
        return max(_MIN_SLOTS, -(-(-(-vectors // threads) - in_registers) // 2) * 2)

    def room(blocks: int) -> int:
        free = (info.shared_per_block + 1024) // blocks - 1024 - _STATIC_SHARED
        return free // (threads_of(blocks) * 16) // 2 * 2

    def all_in_use(threads: int) -> bool:  # every register has a vector
        return vectors >= (in_registers + 1) * threads

    counts = range(1, warps // _MIN_WARPS + 1)
    max_blocks = max((b for b in counts if slots_of(threads_of(b)) <= room(b)), default=0)
    wanted = max(-(-rows // info.sm_count), next(b for b in counts if all_in_use(threads_of(b)) or b == counts[-1]))
    blocks, row_blocks = max(1, min(max_blocks, wanted)), 1
    if _clusters(device):
        rounds = -(-rows // info.sm_count)
        if max_blocks == 0 or (blocks == 1 and 2 * rows <= info.sm_count and all_in_use(2 * threads_of(1))):
            row_blocks = 2
        elif max_blocks == 1 and rows > info.sm_count and rounds * info.sm_count > _FINE * rows:
            blocks = row_blocks = 2
    threads = threads_of(blocks)
    slots = min(slots_of(row_blocks * threads), room(blocks))
    grid = min(rows, info.sm_count * blocks // row_blocks) * row_blocks
    return LongLayout(grid, threads, slots * threads * 16, slots, row_blocks, in_registers)


def few_rows_step(c: Call, short: int, reduction: int, out_stride: int, sums: tuple[str | int, ...]) -> Step | None:
    """Return the launch of cross_entropy_few_rows, if it is the best for these rows. `sums`: loss, accuracy, factor."""
    summed = reduction != NONE
    blocks = few_rows_blocks(c.vectors, c.rows, c.device, short, summed)
    if not blocks:
        return None
    threads = few_rows_threads(c.vectors, blocks)
    launch = FEW_ROWS.bind((c.t,), c.device, c.rows * blocks, threads, cluster=blocks)
    logits, out, *results = c.names
    sums = (*sums, "arrived") if summed else (0, 0, 0, 0)
    sizes = c.rows, c.cols, c.stride, out_stride, c.labels_int64, c.ignore_index, reduction, blocks, blocks * threads
    return Step(launch, logits, out, "labels", *results, *sums, "report", *sizes, *c.numbers)


def gradient_step(c: Call, factor: str | int, out_stride: int, overlap: bool) -> Step:
    """Return the launch of a kernel that writes results and gradient from one read of the logits."""
    logits, out, *results = c.names
    tensors = logits, out, "labels", *results, factor, "report"
    sizes = c.rows, c.cols, c.stride, out_stride, c.labels_int64, c.ignore_index
    if c.vectors <= SHORT:
        threads = _group(c.vectors, _SHORT_THREADS)
        launch = GRAD_SHORT.bind((c.t,), c.device, *row_grid(c.rows, threads), overlap=overlap)
        return Step(launch, *tensors, *sizes, threads, *c.numbers)
    grid, threads, shared, slots, blocks, in_registers = long_layout(c.vectors, c.rows, c.device)
    prefetch_switch = (-(-c.vectors // (threads * blocks)) - _L2_PREFETCH - in_registers + 1) // 2 * 2
    launch = GRAD_LONG.bind((c.t,), c.device, grid, threads, shared, overlap=overlap, cluster=blocks)
    layout = slots, prefetch_switch, blocks, threads * blocks, grid // blocks
    return Step(launch, *tensors, *sizes, "drawn", *layout, *c.numbers)


def reduce_step(
    c: Call, losses: str | int, correct: str | int, results: tuple[str | int, ...], mean: bool, overlap: bool,
    parts: str = "parts",
) -> tuple[Step, dict[str, int]]:  # fmt: skip
    """Return the launch that sums over rows, and the zeros that it needs. `results`: loss, accuracy, factor.

    What several blocks leave for the last one, a counter and numbers, is memory that nobody gets a second time: kernels
    that start before this one has ended must not get what it still needs.
    """
    blocks = 1 if c.rows <= _REDUCE_ALONE else min(-(-c.rows // _REDUCE_ROWS), 1024)
    launch = REDUCE.bind(("fp32",), c.device, blocks, 1024, overlap=overlap)
    zeros = {parts: 3 * blocks + 1} if blocks > 1 else {}
    numbers = c.rows, c.labels_int64, c.ignore_index, int(mean)
    return Step(launch, losses, correct, "labels", *results, parts if zeros else 0, *numbers), zeros


def plan_scale(dlogits: Meta, dloss: Meta, device: int) -> Steps:
    stride = dlogits.row_stride
    if stride is None:
        return IN_TORCH
    rows, cols, t = dlogits.rows, dlogits.shape[-1], dlogits.token
    threads = _group(cols // WIDTH[t], _BACKWARD_THREADS)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), 8 * device_info(device).sm_count)
    launch = SCALE.bind((t,), device, grid, block, overlap=True)
    return Steps(Step(launch, "dlogits", "dloss", rows, cols, stride, int(dloss.numel() != 1), threads))
