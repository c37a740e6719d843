"""The kernels that move whole rows, the choice between them, their launches, and references in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.index.embedding_plan import sum_steps
from rtkernels.runtime.checks import check_dtype, check_same, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import group_threads, row_blocks, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps

MAX_CHUNKS = 65536
SHARED_CHUNKS = 8192  # more are looked up by torch: twelve bytes of shared memory each
_CHUNK_THREADS = 512
_PREFETCHED_BYTES = _CHUNK_THREADS * 4 * 128  # of x that one block asks L2 for; kAskedLines in index/sort_chunks.cu
MAX_PREFETCHED = 2**23  # bytes
LIMIT = 2**31 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SELECT = Kernel(
    "index/index_select.cu", "row_select", template="BYTES", max_registers=56,
    args="indices:ptr x:ptr y:ptr scale:ptr scale_y:ptr count:i64 units:i64 x_stride:i64 y_stride:i64 rows:i64 "
    "ids_int64:i64 threads_per_row:i64 scale_words:i64 scale_stride:i64",
    variants=[(16,), (4,), (2,), (1,)],
)  # fmt: skip
_CHUNKS = Kernel(
    "index/sort_chunks.cu", "chunk_rows", template="THREADS", max_registers=48,
    args="counts:ptr order:ptr source:ptr chunk_count:i64 rows:i64 counts_int64:i64 order_int64:i64 inverse:i64 "
    "x:ptr blocks:i64 prefetch_bytes:i64",
    variants=[(_CHUNK_THREADS,)],
)  # fmt: skip
KERNELS = (_SELECT, _CHUNKS)

# ---- validation -----------------------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_indices(name: str, indices: Meta) -> None:
    """Raise an ArgumentError unless a list of rows or chunks is one."""
    check_dtype(name, indices[0])
    if len(indices[1]) != 1:
        raise ArgumentError(f"{name} has shape {tuple(indices[1])}; expected one dimension")


def check_select(x: Meta, indices: Meta, scale: Meta | None) -> None:
    """Raise an ArgumentError for rows that cannot be selected."""
    if len(x[1]) != 2:
        raise ArgumentError(f"x has {len(x[1])} dimensions; expected 2, [rows, columns]")
    if x[0].itemsize not in _BITS:
        raise ArgumentError(f"x has dtype {_name(x[0])}; expected elements of 1, 2, 4 or 8 bytes")
    if x[1][0] > LIMIT or (len(indices[1]) == 1 and indices[1][0] > LIMIT):
        raise ArgumentError(f"x has {x[1][0]} rows and indices {indices[1][0]}; expected fewer than 2^31 of either")
    check_indices("indices", indices)
    if scale is None:
        return
    if scale[0] != torch.float32:
        raise ArgumentError(f"scale has dtype {_name(scale[0])}; expected float32")
    if len(scale[1]) not in (1, 2) or scale[1][0] != x[1][0]:
        raise ArgumentError(
            f"scale has shape {tuple(scale[1])}; expected {(x[1][0],)} or {(x[1][0], 'any')}: x has {x[1][0]} rows"
        )


def check_select_into(out: Meta, x: Meta, indices: Meta, scale: Meta | None) -> None:
    """Raise an ArgumentError unless selected rows can be written to a given tensor."""
    check_select(x, indices, scale)
    count = indices.shape[0]
    check_same("out", out[0], x[0], "dtype")
    if tuple(out[1]) != (count, x[1][1]):
        raise ArgumentError(f"out has shape {tuple(out[1])}; expected {(count, x[1][1])}")
    step = out.row_stride
    if step is None or (count > 1 and step < x[1][1]):
        raise ArgumentError(f"out has strides {tuple(out[2])}; expected unit-stride rows that do not overlap")


def check_chunks(x: Meta, counts: Meta, order: Meta, scale: Meta | None) -> None:
    """Raise an ArgumentError for chunks that cannot be put into another order."""
    check_rows(x, scale)
    rows = x[1][0]
    check_indices("counts", counts)
    check_indices("order", order)
    if counts[1] != order[1]:
        raise ArgumentError(f"order has shape {tuple(order[1])}; expected {tuple(counts[1])}, that of counts")
    if counts[1][0] > MAX_CHUNKS:
        raise ArgumentError(f"there are {counts[1][0]} chunks; expected no more than {MAX_CHUNKS}")
    if not 0 <= rows <= LIMIT:
        raise ArgumentError(f"rows is {rows}; expected 0 to 2^31 - 1")


def check_rows(x: Meta, scale: Meta | None) -> None:
    check_select(x, (torch.int32, (0,), (1,), x[3]), scale)


def check_scatter(x: Meta, indices: Meta, rows: int, weights: Meta | None) -> None:
    """Raise an ArgumentError for rows that cannot be added to others."""
    token("x", x.dtype)
    if x.dim() != 2:
        raise ArgumentError(f"x has {x.dim()} dimensions; expected 2, [rows, columns]")
    check_indices("indices", indices)
    if indices.shape[0] != x.shape[0]:
        raise ArgumentError(
            f"indices has shape {tuple(indices.shape)}; expected {(x.shape[0],)}, one for each row of x"
        )
    if not 0 <= rows <= LIMIT or x.shape[0] > LIMIT:
        raise ArgumentError(f"rows is {rows} and x has {x.shape[0]} rows; expected 0 to 2^31 - 1 of either")
    if weights is not None:
        token("weights", weights.dtype)
        if weights.shape != indices.shape or weights.device != x.device:
            raise ArgumentError(
                f"weights has shape {tuple(weights.shape)} on device index {weights.device}; expected "
                f"{tuple(indices.shape)} on {x.device}, one for each row of x"
            )


def check_scatter_into(out: Meta, x: Meta, indices: Meta, weights: Meta | None) -> None:
    """Raise an ArgumentError for rows that cannot be added to those of `out`."""
    check_scatter(x, indices, out.shape[0] if out.shape else 0, weights)
    token("out", out.dtype)
    if out.dim() != 2 or out.shape[1] != x.shape[1] or out.device != x.device:
        raise ArgumentError(
            f"out has shape {tuple(out.shape)} on device index {out.device}; expected (rows, {x.shape[1]}) on "
            f"{x.device}"
        )
    step = out.row_stride
    if step is None or (out.shape[0] > 1 and step < out.shape[1]):
        raise ArgumentError(f"out has strides {tuple(out.stride)}; expected unit-stride rows that do not overlap")


# ---- plans ----------------------------------------------------------------------------------------------------------


def plan_select(x: Meta, indices: Meta, scale: Meta | None, device: int) -> Steps:
    return Steps(_select(x, indices.shape[0], indices.dtype, scale, device))


def plan_select_into(out: Meta, x: Meta, indices: Meta, scale: Meta | None, device: int) -> Steps:
    return Steps(_select(x, indices.shape[0], indices.dtype, scale, device, out=out))


def _select(
    x: Meta, count: int, index_dtype: torch.dtype, scale: Meta | None, device: int, out: Meta | None = None,
    indices: str = "indices", overlap: bool = False,
) -> Step:  # fmt: skip
    """Return the launch that moves the rows which `count` indices name, to y or `out`."""
    (rows, cols), size = x.shape, x.dtype.itemsize
    stride, out_stride = x.row_stride, cols if out is None else out.row_stride
    words = 0 if scale is None else 1 if scale.dim() == 1 else scale.shape[1]
    width = vector_bytes(misaligned(x, out), cols * size, stride * size, out_stride * size)
    width = 16 if width == 16 else min(width, 4)
    units = cols * size // width
    threads = group_threads(max(-(-units // 4), 1), 256)
    grid, block = row_blocks(count, threads)
    launch = _SELECT.bind((width,), device, grid, block, overlap=overlap)
    indices_int64 = int(index_dtype == torch.int64)
    sizes = count, units, stride * size, out_stride * size, rows, indices_int64, threads, words, words * 4
    return Step(launch, indices, "x", "y" if out is None else "out", "scale", "moved", *sizes)


def plan_scatter(x: Meta, indices: Meta, rows: int, weights: Meta | None, device: int) -> Steps:
    shape = rows, x.shape[1]
    out = Meta(x.dtype, shape, dense_strides(shape), device, 0)
    return plan_scatter_into(out, x, indices, weights, False, device)


def plan_scatter_into(
    out: Meta, x: Meta, indices: Meta, weights: Meta | None, accumulate: bool, device: int
) -> Steps:  # fmt: skip
    names = "x", "out", "indices", 0 if weights is None else "weights"
    return sum_steps(x, indices, out, 0, -1, device, *names, accumulate)


def plan_chunks(x: Meta, counts: Meta, order: Meta, scale: Meta | None, inverse: bool, device: int) -> Steps:
    rows, chunks = x.shape[0], counts.shape[0]
    if chunks == 0 or chunks > SHARED_CHUNKS:
        return IN_TORCH
    grid = max(1, min(-(-rows // _CHUNK_THREADS), device_info(device).sm_count))
    x_bytes = ((rows - 1) * x.stride[0] + x.shape[1]) * x.dtype.itemsize
    prefetched = min(x_bytes, MAX_PREFETCHED)
    blocks = grid + -(-prefetched // _PREFETCHED_BYTES)
    launch = _CHUNKS.bind((_CHUNK_THREADS,), device, blocks, _CHUNK_THREADS, 4 * (3 * chunks + 2))
    int64 = (int(meta.dtype == torch.int64) for meta in (counts, order))
    find = Step(launch, "counts", "order", "source", chunks, rows, *int64, int(inverse), "x", grid, prefetched)
    move = _select(x, rows, torch.int32, scale, device, indices="source", overlap=True)
    return Steps(find, move, scratch={"source": Memory((rows,), torch.int32)})


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def select(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x[indices]``, with zeros for indices that are no row."""
    bits = x.view(_BITS[x.element_size()])  # torch cannot index every type
    places = indices.long()
    if x.shape[0] == 0 or x.numel() == 0:
        return torch.zeros((len(indices), *x.shape[1:]), dtype=bits.dtype, device=x.device).view(x.dtype)
    valid = ((places >= 0) & (places < x.shape[0])).view(-1, *[1] * (x.dim() - 1))
    return torch.where(valid, bits[places.clamp(0, x.shape[0] - 1)], 0).view(x.dtype)


def chunk_rows(counts: Tensor, order: Tensor, rows: int, inverse: bool) -> Tensor:
    """Return the list of rows that index/sort_chunks.cu makes. Waits for nothing."""
    chunks = counts.shape[0]
    row = torch.arange(rows, dtype=torch.int64, device=counts.device)
    if chunks == 0 or rows == 0:
        return torch.full((rows,), -1, dtype=torch.int32, device=counts.device)
    end = counts.long().clamp(0, rows).cumsum(0).clamp(max=rows)
    begin = torch.cat((end.new_zeros(1), end[:-1]))
    position = torch.arange(chunks, dtype=torch.int64, device=counts.device)
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
