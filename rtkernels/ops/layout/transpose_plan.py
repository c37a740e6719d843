"""Launch planning of ``transpose`` and ``transpose_experts``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import GRID_LIMIT, block_of, group_threads, vector_bytes
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import IN_TORCH, Step, Steps

MAX_EXPERTS = 8192  # their table is in shared memory
_SIZES = (1, 2, 4)

TILES = Kernel(
    "layout/transpose.cu", "transpose_tiles", template="S", max_registers=112,
    args="x:ptr y:ptr rows:i64 rows_out:i64 cols:i64 x_stride:i64 y_stride:i64 tiles_across:i64 tiles_down:i64 "
    "inner:i64 x_outer:i64 x_inner:i64 y_outer:i64 y_inner:i64 size:i64",
    variants=[(0,), (1,), (2,), (4,)],
)  # fmt: skip
ROWS = Kernel(
    "layout/transpose.cu", "transpose_rows", template="B", max_registers=64,
    args="x:ptr y:ptr slices:i64 slices_per_row:i64 row_bytes:i64 threads_per_row:i64 "
    "d1:i64 d2:i64 s0:i64 s1:i64 s2:i64",
    variants=[(1,), (2,), (4,), (16,)],
)  # fmt: skip
EXPERTS = Kernel(
    "layout/transpose_experts.cu", "transpose_experts", template="S", max_registers=160,
    args="x:ptr counts:ptr y:ptr rows:i64 rows_out:i64 cols:i64 x_stride:i64 experts:i64 count_width:i64 pad_to:i64 "
    "tiles_across:i64 size:i64",
    variants=[(0,), (1,), (2,)],
)  # fmt: skip
LIST = Kernel(
    "layout/transpose.cu", "transpose_list", template="S", max_registers=112,
    args="matrices:ptr y:ptr rows:i64 rows_out:i64 cols:i64 x_stride:i64 y_stride:i64 y_matrix:i64 tiles_across:i64 "
    "tiles_down:i64 size:i64",
    variants=[(0,), (1,), (2,), (4,)],
)  # fmt: skip
KERNELS = (TILES, ROWS, EXPERTS, LIST)


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def padded(size: int, multiple: int) -> int:
    """Return `size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype.itemsize not in _SIZES:
        raise ArgumentError(f"x has dtype {dtype}; expected one with elements of 1, 2 or 4 bytes".replace("torch.", ""))


def check_pad(pad_to: int) -> None:
    """Raise an ArgumentError unless rows can be padded to a multiple of this."""
    if not 1 <= pad_to <= 65536:
        raise ArgumentError(f"pad_to is {pad_to}; expected 1 to 65536")


def checked_dims(x: Meta, dim0: int, dim1: int, pad_to: int) -> tuple[int, int]:
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
    check_pad(pad_to)
    if pad_to > 1 and high != count - 1:
        raise ArgumentError(f"pad_to is {pad_to}; expected 1 unless the last dimension of x is swapped")
    return low, high


def out_shape(shape: Sequence[int], low: int, high: int, pad_to: int) -> tuple[int, ...]:
    """Return the shape of the result."""
    result = list(shape)
    result[low], result[high] = result[high], padded(result[low], pad_to)
    return tuple(result)


def check_experts(x: Meta, counts: Meta, pad_to: int) -> None:
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
    check_pad(pad_to)
    if padded_rows(x[1][0], counts[1][0], pad_to) >= 2**31:
        raise ArgumentError(f"x has {x[1][0]} rows for {counts[1][0]} experts; expected less than 2^31 with padding")


def padded_rows(rows: int, experts: int, pad_to: int) -> int:
    """Return the most rows that `rows` rows of `experts` experts can become by padding each expert's."""
    return rows + (pad_to - 1) * min(experts, rows)


def _tile(size: int, aligned16: bool) -> tuple[int, int, int]:
    """Return rows, columns and threads of a tile (Squares and SingleElements in layout/transpose_tile.cuh)."""
    if not aligned16:
        return 64, 64, 256
    down, n = 8 if size == 1 else 16, 16 // size
    return down * n, 16 * n, 16 * down


def plan(x: Meta, dim0: int, dim1: int, pad_to: int, device: int) -> Steps:
    low, high = checked_dims(x, dim0, dim1, pad_to)
    if high < x.dim() - 1:
        return _rows(x, low, high, device)
    return _tiles(x, low, out_shape(x.shape, low, high, pad_to), device)


def _tiles(x: Meta, low: int, y_shape: tuple[int, ...], device: int) -> Steps:
    size, shape, stride, y_stride = x.dtype.itemsize, x.shape, x.stride, dense_strides(y_shape)
    others = [d for d in range(len(shape) - 1) if d != low and shape[d] > 1]
    others = [None] * (2 - len(others)) + others
    x_steps = [0 if d is None else stride[d] * size for d in others]
    y_steps = [0 if d is None else y_stride[d] * size for d in others]
    rows, cols, rows_out = shape[low], shape[-1], y_shape[-1]
    x_row = stride[low] * size if rows > 1 else 0
    aligned16 = vector_bytes(x.misaligned, cols * size, rows_out * size, x_row, *x_steps) == 16
    height, width, threads = _tile(size, aligned16)
    across, down = -(-cols // width), -(-rows_out // height)
    outer, inner = (1 if d is None else shape[d] for d in others)
    blocks = across * down * outer * inner
    if blocks > GRID_LIMIT:
        return IN_TORCH
    launch = TILES.bind((size if aligned16 else 0,), device, blocks, threads)
    sizes = rows, rows_out, cols, x_row, y_stride[low] * size, across, down, inner, *x_steps, *y_steps, size
    return Steps(Step(launch, "x", "y", *sizes))


def list_steps(count: int, rows: int, cols: int, size: int, misaligned: int, pad_to: int, device: int) -> Steps:
    """Return the launch for `count` dense matrices whose addresses are in ``table``."""
    rows_out = padded(rows, pad_to)
    aligned16 = vector_bytes(misaligned, cols * size, rows_out * size) == 16
    height, width, threads = _tile(size, aligned16)
    across, down = -(-cols // width), -(-rows_out // height)
    launch = LIST.bind((size if aligned16 else 0,), device, across * down * count, threads)
    strides = cols * size, rows_out * size, cols * rows_out * size
    return Steps(Step(launch, "table", "y", rows, rows_out, cols, *strides, across, down, size))


def _rows(x: Meta, low: int, high: int, device: int) -> Steps:
    size, shape, stride = x.dtype.itemsize, x.shape, x.stride
    order = list(range(len(shape)))
    order[low], order[high] = high, low
    outer = [(shape[d], stride[d] * size if shape[d] > 1 else 0) for d in order[:-1]]
    outer = [(1, 0)] * (3 - len(outer)) + outer
    row_bytes = shape[-1] * size
    access = 16 if vector_bytes(x.misaligned, row_bytes, *(step for _, step in outer)) == 16 else size
    vectors = row_bytes // access
    threads = group_threads(vectors, 256)
    per_row, block = -(-vectors // threads), block_of(threads)
    slices = outer[0][0] * outer[1][0] * outer[2][0] * per_row
    if slices > GRID_LIMIT:
        return IN_TORCH
    grid = -(-slices // (block // threads * (4 if access == 16 else 8)))
    sizes = slices, per_row, row_bytes, threads, outer[1][0], outer[2][0], *(step for _, step in outer)
    return Steps(Step(ROWS.bind((access,), device, grid, block), "x", "y", *sizes))


def plan_experts(x: Meta, counts: Meta, pad_to: int, device: int) -> Steps:
    (rows, cols), size, experts = x.shape, x.dtype.itemsize, counts.shape[0]
    rows_out, step = padded_rows(rows, experts, pad_to), x.row_stride
    aligned16 = size < 4 and vector_bytes(x.misaligned, cols * size, step * size, pad_to * size) == 16
    height, width, threads = _tile(size, aligned16)
    across = -(-cols // width)
    tiles = across * (rows_out // height + min(experts, rows))
    resident = 1024 // threads * device_info(device).sm_count
    shared = 12 * (experts + 1)
    launch = EXPERTS.bind((size if aligned16 else 0,), device, min(tiles, resident), threads, shared=shared)
    sizes = rows, rows_out, cols, step * size, experts, counts.dtype.itemsize, pad_to, across, size
    return Steps(Step(launch, "x", "counts", "y", *sizes))
