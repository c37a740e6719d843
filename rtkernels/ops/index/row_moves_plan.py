"""The kernels that move whole rows, which one runs how for which tensors, and the same in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import GRID_LIMIT, block_of, check_same, group_threads, row_stride, vector_bytes

Meta = tuple[Any, ...]
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_CHUNKS = 65536
SHARED_CHUNKS = 8192  # more are looked up by torch: twelve bytes of shared memory each
_CHUNK_THREADS = 512
_ASKED_BYTES = _CHUNK_THREADS * 4 * 128  # of x that one block asks L2 for; kAskedLines in index/sort_chunks.cu
MOST_ASKED = 2**23  # bytes
LIMIT = 2**31 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SELECT = Kernel(
    "index/index_select.cu",
    "row_select",
    template="BYTES",
    args="indices:ptr x:ptr y:ptr scale:ptr scale_y:ptr count:i64 units:i64 x_stride:i64 y_stride:i64 rows:i64 "
    "wide:i64 threads_per_row:i64 scale_words:i64 scale_stride:i64",
    variants=[(16,), (4,), (2,), (1,)],
    max_registers=56,
)
_CHUNKS = Kernel(
    "index/sort_chunks.cu",
    "chunk_rows",
    template="THREADS",
    args="counts:ptr order:ptr source:ptr chunk_count:i64 rows:i64 counts_wide:i64 order_wide:i64 inverse:i64 "
    "x:ptr blocks:i64 ahead:i64",
    variants=[(_CHUNK_THREADS,)],
    max_registers=48,
)
KERNELS = (_SELECT, _CHUNKS)

# ---- validation -----------------------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_indices(name: str, indices: Meta, device: int) -> None:
    """Raise an ArgumentError unless a list of rows or chunks is one."""
    if indices[0] not in INDEX_DTYPES:
        raise ArgumentError(f"{name} has dtype {_name(indices[0])}; expected one of int32, int64")
    if len(indices[1]) != 1:
        raise ArgumentError(f"{name} has shape {tuple(indices[1])}; expected one dimension")
    check_same(name, indices[3], device, "device index")


def check_select(x: Meta, indices: Meta, scale: Meta | None) -> None:
    """Raise an ArgumentError for rows that cannot be selected."""
    if len(x[1]) != 2:
        raise ArgumentError(f"x has {len(x[1])} dimensions; expected 2, [rows, columns]")
    if x[0].itemsize not in _BITS:
        raise ArgumentError(f"x has dtype {_name(x[0])}; expected elements of 1, 2, 4 or 8 bytes")
    if x[1][0] > LIMIT or (len(indices[1]) == 1 and indices[1][0] > LIMIT):
        raise ArgumentError(f"x has {x[1][0]} rows and indices {indices[1][0]}; expected fewer than 2^31 of either")
    check_indices("indices", indices, x[3])
    if scale is None:
        return
    if scale[0] != torch.float32:
        raise ArgumentError(f"scale has dtype {_name(scale[0])}; expected float32")
    if len(scale[1]) not in (1, 2) or scale[1][0] != x[1][0]:
        raise ArgumentError(
            f"scale has shape {tuple(scale[1])}; expected {(x[1][0],)} or {(x[1][0], 'any')}: x has {x[1][0]} rows"
        )
    check_same("scale", scale[3], x[3], "device index")


def check_out(out: Meta, x: Meta, count: int) -> None:
    """Raise an ArgumentError unless selected rows can be written to a given tensor."""
    check_same("out", out[0], x[0], "dtype")
    check_same("out", out[3], x[3], "device index")
    if tuple(out[1]) != (count, x[1][1]):
        raise ArgumentError(f"out has shape {tuple(out[1])}; expected {(count, x[1][1])}")
    step = row_stride(out[1], out[2])
    if step is None or (count > 1 and step < x[1][1]):
        raise ArgumentError(f"out has strides {tuple(out[2])}; expected unit-stride rows that do not overlap")


def check_chunks(counts: Meta, order: Meta, rows: int) -> None:
    """Raise an ArgumentError for chunks that cannot be put into another order."""
    check_indices("counts", counts, counts[3])
    check_indices("order", order, counts[3])
    if counts[1] != order[1]:
        raise ArgumentError(f"order has shape {tuple(order[1])}; expected {tuple(counts[1])}, that of counts")
    if counts[1][0] > MAX_CHUNKS:
        raise ArgumentError(f"there are {counts[1][0]} chunks; expected no more than {MAX_CHUNKS}")
    if not 0 <= rows <= LIMIT:
        raise ArgumentError(f"rows is {rows}; expected 0 to 2^31 - 1")


# ---- plans ----------------------------------------------------------------------------------------------------------


def _plan_select(x: Meta, indices: Meta, scale: Meta | None, out: Meta | None, align: int, after_chunks: bool):
    """Return ``(launch, integers, allocators and layouts of y and its scale)``; None if an input must be copied.

    Args:
        x: Metadata.
        indices: Metadata.
        scale: Metadata, or None.
        out: Metadata of y, if it is given.
        align: Of x and y, in bytes.
        after_chunks: The previous kernel of the stream made the indices, and nothing else that is read.
    """
    check_select(x, indices, scale)
    dtype, (rows, cols), stride, device = x
    count, size = indices[1][0], dtype.itemsize
    if out is not None:
        check_out(out, x, count)
    memory = dense_memory(device, (count, cols), dtype) if out is None else None
    scale_memory = None if scale is None else dense_memory(device, (count, *scale[1][1:]), torch.float32)
    words = 0 if scale is None else 1 if len(scale[1]) == 1 else scale[1][1]
    if count == 0 or cols + words == 0:
        return None, (), memory, scale_memory
    step = row_stride((rows, cols), stride)
    scale_step = 0
    if scale is not None:
        scale_step = row_stride((rows, words), scale[2] if len(scale[1]) == 2 else (*scale[2], 1))
    if step is None or scale_step is None or (count > 1 and indices[2] != (1,)):
        return None
    y_step = cols if out is None else row_stride(out[1], out[2])
    width = vector_bytes(align, cols * size, step * size, y_step * size)
    width = 16 if width == 16 else min(width, 4)
    units = cols * size // width
    threads = group_threads(max(-(-units // 4), 1), 256)
    block = block_of(threads)
    grid = min(-(-count // (block // threads)), GRID_LIMIT)
    launch = _SELECT.bind((width,), device, grid, block, overlap=after_chunks)
    wide = int(indices[0] == torch.int64)
    integers = (count, units, step * size, y_step * size, rows, wide, threads, words, scale_step * 4)
    return launch, integers, memory, scale_memory


SELECT_PLANS = Plans(_plan_select)


def _plan_chunks(counts: Meta, order: Meta, rows: int, x_bytes: int):
    """Return ``(launch, integers before and after inverse, allocator and layout of the list)``.

    The launch is None if torch has to do it. `x_bytes` is how much memory the rows take.
    """
    check_chunks(counts, order, rows)
    chunks, device = counts[1][0], counts[3]
    memory = dense_memory(device, (rows,), torch.int32)
    if chunks == 0 or chunks > SHARED_CHUNKS or rows == 0:
        return None, (), (), memory
    grid = max(1, min(-(-rows // _CHUNK_THREADS), device_info(device).sm_count))
    ahead = min(x_bytes, MOST_ASKED)
    blocks = grid + -(-ahead // _ASKED_BYTES)
    launch = _CHUNKS.bind((_CHUNK_THREADS,), device, blocks, _CHUNK_THREADS, 4 * (3 * chunks + 2))
    wide = tuple(int(meta[0] == torch.int64) for meta in (counts, order))
    return launch, (chunks, rows, *wide), (grid, ahead), memory


CHUNK_PLANS = Plans(_plan_chunks)

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def select(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x[indices]``, with zeros for indices that are no row."""
    bits = x.view(_BITS[x.element_size()])  # torch cannot index every type
    wide = indices.long()
    if x.shape[0] == 0 or x.numel() == 0:
        return torch.zeros((len(indices), *x.shape[1:]), dtype=bits.dtype, device=x.device).view(x.dtype)
    valid = ((wide >= 0) & (wide < x.shape[0])).view(-1, *[1] * (x.dim() - 1))
    return torch.where(valid, bits[wide.clamp(0, x.shape[0] - 1)], 0).view(x.dtype)


def chunk_rows(counts: Tensor, order: Tensor, rows: int, inverse: bool) -> Tensor:
    """Return the list of rows that index/sort_chunks.cu makes. Waits for nothing."""
    chunks = counts.shape[0]
    row = torch.arange(rows, device=counts.device)
    if chunks == 0 or rows == 0:
        return torch.full((rows,), -1, dtype=torch.int32, device=counts.device)
    end = counts.long().clamp(0, rows).cumsum(0).clamp(max=rows)
    begin = torch.cat((end.new_zeros(1), end[:-1]))
    position = torch.arange(chunks, device=counts.device)
    chunk = order.long()
    exists = (chunk >= 0) & (chunk < chunks)
    chunk = chunk.clamp(0, chunks - 1)
    entry = torch.full_like(position, chunks).scatter_reduce(0, chunk, torch.where(exists, position, chunks), "amin")
    named = exists & (entry[chunk] == position)
    length = torch.where(named, (end - begin)[chunk], 0)
    target_end = length.cumsum(0)
    target = target_end - length
    at = torch.searchsorted(end if inverse else target_end, row, right=True)
    inside, at = at < chunks, at.clamp(max=chunks - 1)
    if inverse:
        inside = inside & (entry[at] < chunks)
        found = target[entry[at].clamp(max=chunks - 1)] + row - begin[at]
    else:
        found = begin[chunk[at]] + row - target[at]
    return torch.where(inside, found, -1).to(torch.int32)
