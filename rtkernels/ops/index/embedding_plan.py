"""The kernels of the embedding, and which one runs how for which tensors."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    DTYPE_TOKEN,
    GRID_LIMIT,
    block_of,
    check_same,
    group_threads,
    row_count,
    row_stride,
    token,
    vector_bytes,
)

ID_DTYPES = (torch.int32, torch.int64)
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_SORT_ROUNDS, _SORT_THREADS = 16, 1024
SORT_LIMIT = _SORT_ROUNDS * _SORT_THREADS  # tokens; more are sorted in passes
_BIN_TOKENS, _MOST_BIN_BITS = 64, 7  # tokens a sorting block should have at least; 2^7 blocks at most
_MOST_LOW_BITS = 17  # of the key: 31 with the bits of a token
_FILL_BYTES = _SORT_THREADS * 16 * 16  # zeros one block writes
_SUM_THREADS = 128
_WINDOW = 32
LEAST_WINDOWS, MOST_WINDOWS = 256, 2048  # beyond the first, as many as run at once
_SUM_BLOCKS = 4  # of embedding_sum on a processor

_FWD = Kernel(
    "index/embedding_lookup.cu",
    "embedding_fwd",
    template="BYTES",
    args="ids:ptr weight:ptr y:ptr tokens:i64 units:i64 weight_stride:i64 rows:i64 start:i64 wide:i64 "
    "threads_per_row:i64",
    variants=[(16,), (4,), (2,)],
    max_registers=48,
)
_SORT = Kernel(
    "index/embedding_sort.cu",
    "embedding_sort",
    template="ROUNDS",
    args="ids:ptr list:ptr counters:ptr fill:ptr tokens:i64 rows:i64 start:i64 padding:i64 wide:i64 key_bits:i64 "
    "bin_bits:i64 counter_count:i64 fill_bytes:i64",
    variants=[(_SORT_ROUNDS,)],
    max_registers=64,
)
# Gradients whose rows cannot be accessed in pieces of 16 bytes, and other pairs of types, take dy as fp32.
_PAIRS = ("bf16 bf16", "bf16 fp32", "fp16 fp16", "fp16 fp32", "fp32 fp32")
_SUM = Kernel(
    "index/embedding_sum.cu",
    "embedding_sum",
    template="FROM TO VEC ADDS",
    args="dy:ptr grad:ptr entries:ptr partial:ptr counters:ptr weights:ptr tokens:i64 cols:i64 dy_stride:i64 "
    "grad_stride:i64 window_size:i64 dy_half:i64 grad_half:i64 accumulate:i64",
    variants=[(2, 2, 8, False), *((*each, True) for each in ((2, 2, 8), (2, 4, 8), (4, 4, 4), (4, 4, 1), (4, 2, 1)))],
    max_registers=128,
)
KERNELS = (_FWD, _SORT, _SUM)

# ---- validation -----------------------------------------------------------------------------------------------------

Meta = tuple[Any, ...]


def check_ids(ids: Meta, device: int, of: str) -> None:
    if ids[0] not in ID_DTYPES:
        raise ArgumentError(f"ids has dtype {str(ids[0]).removeprefix('torch.')}; expected one of int32, int64")
    check_same("ids", ids[3], device, "device index", of=of)


def check_fwd(ids: Meta, weight: Meta) -> None:
    """Raise an ArgumentError for a table or ids that a look-up cannot use."""
    token("weight", weight[0])
    if len(weight[1]) != 2:
        raise ArgumentError(f"weight has {len(weight[1])} dimensions; expected 2, [rows, columns]")
    check_ids(ids, weight[3], "weight")


def check_bwd(dy: Meta, ids: Meta, rows: int) -> None:
    """Raise an ArgumentError for arguments of the gradient that do not fit together."""
    token("dy", dy[0])
    if tuple(dy[1][:-1]) != tuple(ids[1]) or not dy[1]:
        raise ArgumentError(
            f"dy has shape {tuple(dy[1])}; expected {(*ids[1], 'columns')}, the shape of ids and columns"
        )
    if rows < 0:
        raise ArgumentError(f"rows is {rows}; expected 0 or more")
    if rows > 2**31 - 1 or row_count(dy[1]) > 2**31 - 1:
        raise ArgumentError(f"{rows} rows and {row_count(dy[1])} tokens; expected fewer than 2^31 of either")
    check_ids(ids, dy[3], "dy")


def check_main_grad(main_grad: Meta, cols: int, device: int, of: str) -> None:
    """Raise an ArgumentError for a gradient that cannot be added to."""
    dtype, shape, stride, where = main_grad
    token("main_grad", dtype)
    if len(shape) != 2 or shape[1] != cols:
        raise ArgumentError(f"main_grad has shape {tuple(shape)}; expected (rows, {cols})")
    check_same("main_grad", where, device, "device index", of=of)
    step = row_stride(shape, stride)
    if step is None or (shape[0] > 1 and step < cols):
        raise ArgumentError(f"main_grad has strides {tuple(stride)}; expected unit-stride rows that do not overlap")


# ---- plans: plain metadata in, bound launches out -------------------------------------------------------------------


def _plan_fwd(ids: Meta, weight: Meta, align: int):
    """Return ``(launch, integers, integers after start, allocator and layout of y)``; None if weight must be copied."""
    check_fwd(ids, weight)
    dtype, (rows, cols), stride, device = weight
    tokens = row_count((*ids[1], 1))
    memory = dense_memory(device, (*ids[1], cols), dtype)
    if tokens == 0 or cols == 0:
        return None, (), (), *memory
    step, size = row_stride((rows, cols), stride), dtype.itemsize
    if step is None or not _dense(ids):
        return None
    width = vector_bytes(align, cols * size, step * size)
    width = 16 if width == 16 else min(width, 4)
    units = cols * size // width
    threads = group_threads(-(-units // 4), 256)
    block = block_of(threads)
    launch = _FWD.bind((width,), device, min(-(-tokens // (block // threads)), GRID_LIMIT), block)
    return launch, (tokens, units, step * size, rows), (int(ids[0] == torch.int64), threads), *memory


def _dense(ids: Meta) -> bool:
    return row_stride((*ids[1], 1), (*ids[2], 1)) == 1


FWD_PLANS = Plans(_plan_fwd)


def _plan_sort(tokens: int, rows: int, fill_bytes: int, device: int):
    """Return ``(launch, key bits, bin bits)``; None if they are sorted in passes."""
    key_bits = max(1, (rows - 1).bit_length())
    processors = device_info(device).sm_count.bit_length() - 1
    bin_bits = min((-(-tokens // _BIN_TOKENS) - 1).bit_length(), processors, _MOST_BIN_BITS, key_bits)
    bin_bits = max(bin_bits, key_bits - _MOST_LOW_BITS)
    if tokens > SORT_LIMIT or bin_bits > _MOST_BIN_BITS:
        return None
    grid = (1 << bin_bits) + -(-fill_bytes // _FILL_BYTES)
    return _SORT.bind((_SORT_ROUNDS,), device, grid, _SORT_THREADS, 4 * tokens), key_bits, bin_bits


SORT_PLANS = Plans(_plan_sort)


def _plan_sum(dy: Meta, grad: Meta, align: int, accumulate: bool):
    """Return ``(launch, integers, allocators and layouts of list, counters and pieces)``; None if dy must be fp32."""
    tokens, cols = row_count(dy[1]), dy[1][-1]
    t, g = DTYPE_TOKEN[dy[0]], DTYPE_TOKEN[grad[0]]
    dy_stride, grad_stride = row_stride(dy[1], dy[2]), row_stride(grad[1], grad[2])
    wide = vector_bytes(align, cols * dy[0].itemsize, dy_stride * dy[0].itemsize, grad_stride * grad[0].itemsize) == 16
    if not (wide and f"{t} {g}" in _PAIRS):
        if t != "fp32":
            return None
        wide = False
    vec = _WIDTH[t] if wide else 1
    threads = min(-(-cols // (vec * 32)) * 32, _SUM_THREADS)
    slices = -(-cols // (threads * vec))
    device = dy[3]
    at_once = device_info(device).sm_count * _SUM_BLOCKS * _SUM_THREADS // (threads * slices)
    most = min(max(at_once, LEAST_WINDOWS), MOST_WINDOWS)
    window = _WINDOW * -(-tokens // (_WINDOW * most))
    windows = -(-tokens // window)
    sizes = (dy[0].itemsize, grad[0].itemsize, vec)
    variant = (*sizes, accumulate or sizes != (2, 2, 8))
    launch = _SUM.bind(variant, device, (windows, slices), threads, overlap=True)
    return (
        launch,
        (tokens, cols, dy_stride, grad_stride, window, int(t == "fp16"), int(g == "fp16")),
        dense_memory(device, (tokens,), torch.int64),
        dense_memory(device, (3 * windows * slices,), torch.int32),
        dense_memory(device, (2 * windows * cols,), torch.float32),
    )


SUM_PLANS = Plans(_plan_sum)
