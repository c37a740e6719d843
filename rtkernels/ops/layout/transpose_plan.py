"""Launch planning of ``transpose`` and ``transpose_experts``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import GRID_LIMIT, block_of, check_same, group_threads, row_stride, vector_bytes

MAX_EXPERTS = 8192  # their table is in shared memory
_SIZES = (1, 2, 4)

TILES = Kernel(
    "layout/transpose.cu",
    "transpose_tiles",
    template="S",
    args="x:ptr y:ptr rows:i64 rows_out:i64 cols:i64 x_stride:i64 y_stride:i64 tiles_across:i64 tiles_down:i64 "
    "inner:i64 x_outer:i64 x_inner:i64 y_outer:i64 y_inner:i64 size:i64",
    variants=[(0,), (1,), (2,), (4,)],
    max_registers=112,
)
ROWS = Kernel(
    "layout/transpose.cu",
    "transpose_rows",
    template="B",
    args="x:ptr y:ptr pieces:i64 chunks:i64 row_bytes:i64 threads_per_row:i64 d1:i64 d2:i64 s0:i64 s1:i64 s2:i64",
    variants=[(1,), (2,), (4,), (16,)],
    max_registers=64,
)
EXPERTS = Kernel(
    "layout/transpose_experts.cu",
    "transpose_experts",
    template="S",
    args="x:ptr counts:ptr y:ptr rows:i64 rows_out:i64 cols:i64 x_stride:i64 experts:i64 count_width:i64 pad_to:i64 "
    "tiles_across:i64 size:i64",
    variants=[(0,), (1,), (2,)],
    max_registers=160,
)
KERNELS = (TILES, ROWS, EXPERTS)
Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def padded(size: int, multiple: int) -> int:
    """Return `size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype.itemsize not in _SIZES:
        raise ArgumentError(f"x has dtype {dtype}; expected one with elements of 1, 2 or 4 bytes".replace("torch.", ""))


def _check_pad(pad_to: int) -> None:
    if not 1 <= pad_to <= 65536:
        raise ArgumentError(f"pad_to is {pad_to}; expected 1 to 65536")


def checked_dims(x: Metadata, dim0: int, dim1: int, pad_to: int) -> tuple[int, int]:
    """Return the two dimensions, smaller first and not negative, or raise an ArgumentError."""
    _check_dtype(x[0])
    count = len(x[1])
    if not 2 <= count <= 4:
        raise ArgumentError(f"x has shape {tuple(x[1])}; expected two to four dimensions")
    for name, dim in (("dim0", dim0), ("dim1", dim1)):
        if not -count <= dim < count:
            raise ArgumentError(f"{name} is {dim}; expected {-count} to {count - 1} for x with {count} dimensions")
    low, high = sorted((dim0 % count, dim1 % count))
    if low == high:
        raise ArgumentError(f"dim0 is {dim0} and dim1 is {dim1}: the same dimension of x; expected two different ones")
    _check_pad(pad_to)
    if pad_to > 1 and high != count - 1:
        raise ArgumentError(f"pad_to is {pad_to}; expected 1 unless the last dimension of x is swapped")
    return low, high


def out_shape(shape: Sequence[int], low: int, high: int, pad_to: int) -> tuple[int, ...]:
    """Return the shape of the result."""
    result = list(shape)
    result[low], result[high] = result[high], padded(result[low], pad_to)
    return tuple(result)


def check_experts(x: Metadata, counts: Metadata, pad_to: int) -> None:
    """Raise an ArgumentError unless rows can be transposed per expert."""
    _check_dtype(x[0])
    if len(x[1]) != 2:
        raise ArgumentError(f"x has shape {tuple(x[1])}; expected two dimensions, rows sorted by expert")
    if counts[0] not in (torch.int32, torch.int64):
        raise ArgumentError(f"counts has dtype {counts[0]}; expected int32 or int64".replace("torch.", ""))
    if len(counts[1]) != 1 or not 1 <= counts[1][0] <= MAX_EXPERTS:
        raise ArgumentError(
            f"counts has shape {tuple(counts[1])}; expected one dimension, the rows of 1 to {MAX_EXPERTS} experts"
        )
    check_same("counts", counts[3], x[3], "device index")
    _check_pad(pad_to)
    if padded_rows(x[1][0], counts[1][0], pad_to) >= 2**31:
        raise ArgumentError(f"x has {x[1][0]} rows for {counts[1][0]} experts; expected less than 2^31 with padding")


def padded_rows(rows: int, experts: int, pad_to: int) -> int:
    """Return the most rows that `rows` rows of `experts` experts can become by padding each expert's."""
    return rows + (pad_to - 1) * min(experts, rows)


# ---- plans ----------------------------------------------------------------------------------------------------------


def _tile(size: int, wide: bool) -> tuple[int, int, int]:
    """Return rows, columns and threads of a tile (Squares and SingleElements in layout/transpose_tile.cuh)."""
    if not wide:
        return 64, 64, 256
    down, n = 8 if size == 1 else 16, 16 // size
    return down * n, 16 * n, 16 * down


def _plan(x: Metadata, dim0: int, dim1: int, pad_to: int, align: int):
    low, high = checked_dims(x, dim0, dim1, pad_to)
    dtype, shape, stride, device = x
    result = dense_memory(device, out_shape(shape, low, high, pad_to), dtype)
    if 0 in shape:
        return None, (), *result
    if shape[-1] > 1 and stride[-1] != 1:
        return None
    tiles = high == len(shape) - 1
    found = _tiles(x, low, result[1][0], align) if tiles else _rows(x, low, high, align)
    return None if found is None else (*found, *result)


def _tiles(x: Metadata, low: int, y_shape: tuple[int, ...], align: int) -> tuple[Launch, tuple[int, ...]] | None:
    dtype, shape, stride, device = x
    size, y_stride = dtype.itemsize, dense_strides(y_shape)
    others = [d for d in range(len(shape) - 1) if d != low and shape[d] > 1]
    others = [None] * (2 - len(others)) + others
    x_steps = [0 if d is None else stride[d] * size for d in others]
    y_steps = [0 if d is None else y_stride[d] * size for d in others]
    rows, cols, rows_out = shape[low], shape[-1], y_shape[-1]
    x_row = stride[low] * size if rows > 1 else 0
    wide = vector_bytes(align, cols * size, rows_out * size, x_row, *x_steps) == 16
    height, width, threads = _tile(size, wide)
    across, down = -(-cols // width), -(-rows_out // height)
    outer, inner = (1 if d is None else shape[d] for d in others)
    blocks = across * down * outer * inner
    if blocks > GRID_LIMIT:
        return None
    launch = TILES.bind((size if wide else 0,), device, blocks, threads)
    steps = (x_steps[0], x_steps[1], y_steps[0], y_steps[1])
    return launch, (rows, rows_out, cols, x_row, y_stride[low] * size, across, down, inner, *steps, size)


def _rows(x: Metadata, low: int, high: int, align: int) -> tuple[Launch, tuple[int, ...]] | None:
    dtype, shape, stride, device = x
    size = dtype.itemsize
    order = list(range(len(shape)))
    order[low], order[high] = high, low
    outer = [(shape[d], stride[d] * size if shape[d] > 1 else 0) for d in order[:-1]]
    outer = [(1, 0)] * (3 - len(outer)) + outer
    row_bytes = shape[-1] * size
    access = 16 if vector_bytes(align, row_bytes, *(step for _, step in outer)) == 16 else size
    vectors = row_bytes // access
    threads = group_threads(vectors, 256)
    chunks, block = -(-vectors // threads), block_of(threads)
    pieces = outer[0][0] * outer[1][0] * outer[2][0] * chunks
    if pieces > GRID_LIMIT:
        return None
    grid = -(-pieces // (block // threads * (4 if access == 16 else 8)))
    args = (pieces, chunks, row_bytes, threads, outer[1][0], outer[2][0], *(step for _, step in outer))
    return ROWS.bind((access,), device, grid, block), args


def _plan_experts(x: Metadata, counts: Metadata, pad_to: int, align: int):
    check_experts(x, counts, pad_to)
    dtype, (rows, cols), stride, device = x
    size, experts = dtype.itemsize, counts[1][0]
    rows_out = padded_rows(rows, experts, pad_to)
    result = dense_memory(device, (rows_out * cols,), dtype)
    if 0 in x[1]:
        return None, (), *result
    step = row_stride(x[1], stride)
    if step is None:
        return None
    wide = size < 4 and vector_bytes(align, cols * size, step * size, pad_to * size) == 16
    height, width, threads = _tile(size, wide)
    across = -(-cols // width)
    tiles = across * (rows_out // height + min(experts, rows))
    resident = 1024 // threads * device_info(device).sm_count
    launch = EXPERTS.bind((size if wide else 0,), device, min(tiles, resident), threads, shared=12 * (experts + 1))
    return launch, (rows, rows_out, cols, step * size, experts, counts[0].itemsize, pad_to, across, size), *result


PLANS = Plans(_plan)
EXPERT_PLANS = Plans(_plan_experts)
