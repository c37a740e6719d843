"""Writing through indices: scatter without a reduction, and assignment by ``index_put`` (family ``idx``).

Where several elements are written to one place, one of them stays, as in torch; which one is not defined. In
deterministic mode torch's kernels run. Sums are in ``index.py``. An index outside of its dimension stops the kernel, as
it stops torch's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import copy_into, fits, rounded
from rtkernels.aten.index import add_by_index
from rtkernels.aten.strides import overlaps_itself
from rtkernels.aten.table import (
    DTYPE,
    EMPTY,
    INVALID,
    OUT_OF_RANGE,
    OVERLAP,
    RANK,
    SEVERAL,
    STRIDES,
    NotHandled,
    Overload,
)
from rtkernels.aten.values import any_outside
from rtkernels.ops.index.scattering import MAX_INDICES, scatter, scatterable
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import may_overlap

_SUMS, _DETERMINISTIC = NotHandled("sums"), NotHandled("deterministic mode")
_INDICES = (torch.int32, torch.int64)
_FORMATS = {torch.float64: "<d", torch.float32: "<f", torch.float16: "<e"}


def _bits(value: Any, dtype: torch.dtype) -> int | NotHandled:
    """Return the bits of a number as an element."""
    if type(value) not in (bool, int, float):
        return DTYPE
    if dtype == torch.bool:
        return int(bool(value))
    if not dtype.is_floating_point:
        if dtype.is_complex or type(value) is float:
            return DTYPE
        limits = torch.iinfo(dtype)
        return int(value) if limits.min <= value <= limits.max else OUT_OF_RANGE
    if dtype not in _FORMATS and dtype != torch.bfloat16:
        return DTYPE
    if not fits(value, dtype):
        return OUT_OF_RANGE
    packed = struct.pack(_FORMATS.get(dtype, "<f"), value if dtype == torch.float64 else rounded(value, dtype))
    bits = int.from_bytes(packed, "little", signed=True)
    return bits >> 16 if dtype == torch.bfloat16 else bits


def _write(
    x: Tensor, source: Tensor | Any, indices: Sequence[Tensor], dim: int, *, from_end: bool, in_place: bool
) -> Any:
    """Write to x, or to a dense copy of it: what both operators share."""
    if torch.are_deterministic_algorithms_enabled():
        return _DETERMINISTIC
    if x.dtype.itemsize > 8 or any(index.dtype not in _INDICES for index in indices):
        return DTYPE
    given = isinstance(source, Tensor)
    value = 0 if given else _bits(source, x.dtype)
    if isinstance(value, NotHandled):
        return value
    for i, index in enumerate(indices):
        n = x.shape[dim + i]
        if any_outside(index, -n if from_end else 0, n):
            return INVALID
    source = source if given else None
    if in_place:
        if overlaps_itself(tuple(x.shape), x.stride()) or any(may_overlap(x, index) for index in indices):
            return OVERLAP
        if source is not None and may_overlap(x, source):
            return OVERLAP
        out = x
    else:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not scatterable(out, source, indices, dim):
        return STRIDES
    if not in_place and isinstance(copied := copy_into(out, x), NotHandled):
        return copied
    scatter(out, source, indices, dim, from_end=from_end, value=value)
    return out


def _scatter(x: Tensor, dim: int, index: Tensor, src: Any, *, in_place: bool = False) -> Any:
    rank = x.dim()
    if rank == 0 or index.dim() != rank:
        return RANK
    if x.numel() == 0 or index.numel() == 0:
        return EMPTY
    if not -rank <= dim < rank:
        return INVALID
    dim %= rank
    if any(n > have for i, (n, have) in enumerate(zip(index.shape, x.shape, strict=True)) if i != dim):
        return INVALID
    if isinstance(src, Tensor):
        if src.dtype != x.dtype:
            return DTYPE
        if src.dim() != rank or any(n > have for n, have in zip(index.shape, src.shape, strict=True)):
            return INVALID
        for i, n in enumerate(index.shape):
            src = src if src.shape[i] == n else src.narrow(i, 0, n)
    return _write(x, src, (index,), dim, from_end=False, in_place=in_place)


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *, in_place: bool = False) -> Any:
    """Assign through one tensor of indices along any dimension, or two along neighbouring ones."""
    if accumulate:
        return _SUMS
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if not given or len(given) > MAX_INDICES or given[-1] - given[0] != len(given) - 1 or len(indices) > x.dim():
        return SEVERAL
    dim, count = given[0], len(given)
    chosen = [indices[i] for i in given]
    if values.dtype != x.dtype or any(index.dtype not in _INDICES for index in chosen):
        return DTYPE  # masks, too
    if any(tensor.device != x.device for tensor in (values, *chosen)):
        return INVALID  # 0-d values and indices on the CPU
    if any(tensor.numel() == 0 for tensor in (x, values, *chosen)):
        return EMPTY
    if not in_place and x.stride() != dense_strides(x.shape):
        return STRIDES  # which torch's result keeps
    try:
        named = torch.broadcast_shapes(*(index.shape for index in chosen))
        shape = (*x.shape[:dim], *named, *x.shape[dim + count :])
        values = values.expand(shape)
    except RuntimeError:
        return INVALID
    inner = len(shape) - dim - len(named)
    chosen = [index.reshape(*index.shape, *[1] * inner).expand(shape) for index in chosen]
    return _write(x, values, chosen, dim, from_end=True, in_place=in_place)


def _index_put_(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    if accumulate:
        return add_by_index(x, indices, values, True)
    return _index_put(x, indices, values, accumulate, in_place=True)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family. None replays: deterministic mode is not in the key of a call."""
    for source in ("src", "value"):
        yield Overload(f"scatter.{source}", "idx", _scatter, opinfo=("scatter",))
        yield Overload(f"scatter_.{source}", "idx", partial(_scatter, in_place=True), opinfo=("scatter",))
    yield Overload("index_put", "idx", _index_put, opinfo=("index_put",))
    yield Overload("index_put_", "idx", _index_put_, opinfo=("index_put",))
