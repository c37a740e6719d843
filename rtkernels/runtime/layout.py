"""Tensors as kernels see them: rows with a unit-stride last dimension, and helpers for launchers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.runtime.checks import DTYPE_TOKEN as DTYPE_TOKEN
from rtkernels.runtime.checks import FLOAT_DTYPES as FLOAT_DTYPES
from rtkernels.runtime.checks import check_same as check_same
from rtkernels.runtime.checks import token as token
from rtkernels.runtime.torch_private import is_dynamo_compiling

WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
TYPES = [(t,) for t in WIDTH]  # variants of a kernel whose only template argument is a type
# Pairs of types: of a tensor and of its weight.
WEIGHTED_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
GRID_LIMIT = 2**31 - 1  # blocks in x; y and z are limited to 65535

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def row_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the distance between rows in elements, or None if the tensor is not a stack of unit-stride rows.

    Args:
        shape: Any rank from 1; the last dimension is the row.
        stride: As torch gives it. Dimensions of size 1 may have any stride; a single expanded dimension gives 0.
    """
    if 0 in shape:
        return shape[-1]
    if shape[-1] > 1 and stride[-1] != 1:
        return None
    outer = [(size, step) for size, step in zip(shape[:-1], stride[:-1], strict=True) if size != 1]
    if not outer:
        return shape[-1]
    for (_, upper), (size, lower) in pairwise(outer):
        if upper != size * lower:
            return None
    return outer[-1][1]


def row_count(shape: Sequence[int]) -> int:
    """Return the number of rows of a shape (the product of all but the last dimension)."""
    count = 1
    for size in shape[:-1]:
        count *= size
    return count


def as_rows(x: Tensor) -> Tensor:
    """Return a tensor as a matrix of its rows, also without elements, where torch could not infer their number."""
    return x.reshape(row_count(x.shape), x.shape[-1])


def vector_bytes(*multiples: int, limit: int = 16) -> int:
    """Return the widest access in bytes (a power of two up to `limit`) that every given byte count allows.

    Args:
        multiples: Addresses, row lengths and row strides, all in bytes.
        limit: A power of two.
    """
    bits = limit
    for value in multiples:
        bits |= value
    return bits & -bits


# ---- groups of threads that share a row (RowGroup in common/reduce.cuh) ---------------------------------------------


def group_threads(vectors: int, limit: int) -> int:
    """Return how many threads share a row of `vectors` accesses: a power of two up to 32, else whole warps."""
    if vectors <= 32:
        return 1 << max(vectors - 1, 0).bit_length()
    return min(-(-vectors // 32) * 32, limit)


def divisor(d: int) -> int:
    """Return the factor that ``divided`` (common/abi.cuh) needs to divide numbers below 2**31 by `d` exactly.

    With ``2**(s-1) < d <= 2**s`` and ``m = ceil(2**(31+s) / d)``, ``m * d`` exceeds ``2**(31+s)`` by less than
    ``2**s``. Times n, the excess stays below ``2**(31+s)``, so ``n * m >> (31+s)`` is the quotient. m has at most 32
    bits.
    """
    shift = (d - 1).bit_length()
    return shift << 32 | -(-(1 << (31 + shift)) // d)


def halves(lower: int, upper: int) -> int:
    """Pack two numbers below 2**32 into one kernel argument of eight bytes."""
    return int.from_bytes(struct.pack("<II", lower, upper), "little", signed=True)


@lru_cache(maxsize=64)
def float_halves(lower: float, upper: float) -> int:
    """Pack two numbers as float32 into one kernel argument; values out of range become infinite, as in kernels."""
    return halves(*(int.from_bytes(ctypes.c_float(v), "little") for v in (lower, upper)))


def block_of(threads_per_row: int) -> int:
    """Return a block size for one group wider than a warp, or for several narrower ones."""
    return threads_per_row if threads_per_row > 32 else 128


def row_blocks(rows: int, threads_per_row: int) -> tuple[int, int]:
    """Return grid and block that give every row a group of threads; if the grid is limited, blocks loop."""
    block = block_of(threads_per_row)
    return min(-(-rows // (block // threads_per_row)), GRID_LIMIT), block


class RowSlices(NamedTuple):
    """How kernels built on RowSlices (common/row_slices.cuh) partition a matrix, and the launch for it."""

    threads_per_row: int
    slices_per_row: int
    grid: int
    block: int


def row_slices(rows: int, cols: int, per_thread: int, limit: int = 256) -> RowSlices:
    """Cut `rows` rows of `cols` columns into slices of `per_thread` columns for each of up to `limit` threads."""
    threads = group_threads(-(-cols // per_thread), limit)
    per_row = -(-cols // (threads * per_thread))
    return RowSlices(threads, per_row, *row_blocks(rows * per_row, threads))


_EVICT_FIRST_BYTES = 300 << 20


def reads_evict_first(nbytes: int) -> bool:
    """Return True if a kernel that reads `nbytes` and writes much less should mark its reads evict-first in L2.

    Otherwise its reads evict dirty lines, and writing these back costs bandwidth. This saves at most the time to write
    an L2's size, but such reads are 4 % slower, so it pays off only up to a few times that size
    (docs/decisions/common.md).
    """
    return nbytes <= _EVICT_FIRST_BYTES


# ---- tensors --------------------------------------------------------------------------------------------------------


def metadata(t: Tensor | None) -> tuple[Any, ...] | None:
    """Return ``(dtype, shape, stride, device index)``, the hashable part of a plan key for a tensor."""
    return None if t is None else (t.dtype, t.shape, t.stride(), t.get_device())


def is_dense(meta: tuple[Any, ...] | None) -> bool:
    """Return True if a tensor with this metadata is contiguous, or for None."""
    return meta is None or row_stride((*meta[1], 1), (*meta[2], 1)) == 1


def address(t: Tensor | None) -> int:
    """Return the address of a tensor's first element, 0 for None."""
    return 0 if t is None else t.data_ptr()


def extent(t: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last byte of a non-empty tensor."""
    first = t.data_ptr()
    reach = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return first, first + (reach + 1) * t.itemsize


overlap_questions: list[Callable[[Tensor, Tensor, bool], None]] = []  # called with two tensors and whether they overlap
_Ints = Sequence[int]


def overlaps_itself(shape: _Ints, stride: _Ints) -> bool:
    """Return True if two elements of a tensor may have the same address."""
    dims = sorted((abs(step), size) for size, step in zip(shape, stride, strict=True) if size > 1)
    reach = 0
    for step, size in dims:
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def sharing(
    a: tuple[_Ints, _Ints, int], b: tuple[_Ints, _Ints, int]
) -> tuple[int, int, Callable[[int], bool]] | None:
    """Return when two tensors share memory, by the distance in bytes from the first element of `a` to that of `b`.

    Args:
        a: Shape, strides in elements, and the size of an element.
        b: The same for the other tensor.

    Returns:
        Two limits and a function. If the distance is outside the limits, the spans of the tensors do not overlap. For
        other distances the function decides: views in each other's gaps, such as slices of a packed tensor, share
        nothing. None if one of them has no elements.
    """
    if 0 in a[0] or 0 in b[0]:
        return None
    (dims_a, item_a), (dims_b, item_b) = (
        ([(n - 1, s * t[2]) for n, s in zip(t[0], t[1], strict=True) if n > 1 and s], t[2]) for t in (a, b)
    )
    reach_a, reach_b = (sum(n * s for n, s in dims) + item for dims, item in ((dims_a, item_a), (dims_b, item_b)))
    periods = sorted({s for _, s in (*dims_a, *dims_b)}, reverse=True)

    @lru_cache(maxsize=64)
    def share(distance: int) -> bool:
        for period in periods:
            # Moving by a multiple of the period does not change the position within it.
            used_a, used_b = (
                sum(n * s for n, s in dims if s % period) + item for dims, item in ((dims_a, item_a), (dims_b, item_b))
            )
            if used_a <= (first := distance % period) and first + used_b <= period:
                return False
        return True

    return -reach_b, reach_a, share


_sharing = lru_cache(maxsize=256)(sharing)


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors share memory, or if their strides do not allow to exclude it."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (first, last), (begin, end) = extent(a), extent(b)
    overlap = begin < last and first < end
    if overlap:
        found = _sharing((a.shape, a.stride(), a.itemsize), (b.shape, b.stride(), b.itemsize))
        overlap = found[2](int(begin) - int(first))
    for listener in tuple(overlap_questions):  # other threads add and remove theirs
        listener(a, b, overlap)
    return overlap


def in_shape(t: Tensor, *shape: int) -> Tensor:
    """Return a fresh result of a Function in another shape, but not as a view, so that it can be changed in place.

    Torch refuses ``y += 1`` for a view created inside a custom Function, and models do that to results of linear
    layers. Dynamo cannot trace ``_is_view``, and the call below costs nothing in its graphs.
    """
    if not is_dynamo_compiling() and t.shape == shape and not t._is_view():
        return t
    return _UNSAFE_VIEW(t, shape)


def nothing(like: Tensor) -> Tensor:
    """Return a placeholder for an output that was not requested, because operators cannot return None."""
    return torch.empty(0, dtype=torch.float32, device=like.device)
