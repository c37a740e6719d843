"""Indexing of aten: gather, index_select, embedding and its gradient, sums into rows (family ``idx``).

Sums are deterministic: rows that share an index are added in fp32 in a fixed order, without atomics. Writing
without a sum is in ``scatter.py``. An index outside of its dimension stops the kernel, as it stops torch's, but where
many rows are summed, by a sort: there it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.copy import copy_into
from rtkernels.aten.elementwise import run
from rtkernels.aten.functors import functor
from rtkernels.aten.table import DTYPE, EMPTY, INVALID, OPTION, OVERLAP, RANK, SEVERAL, STRIDES, NotHandled, Overload
from rtkernels.aten.values import any_outside
from rtkernels.ops.index.adding import add_many_rows, add_rows, addable, sum_rows
from rtkernels.ops.index.gathering import gather, gatherable
from rtkernels.ops.shared.strided import FLOATS
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import may_overlap

_INDICES = (torch.int32, torch.int64)
_FROM_END = functor("FromEnd", 1, dtypes=frozenset(_INDICES))


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if x.dtype.itemsize > 8 or index.dtype != torch.int64:
        return DTYPE
    if x.dim() == 0 or index.dim() != x.dim():
        return RANK
    if x.numel() == 0 or index.numel() == 0:
        return EMPTY
    if not -x.dim() <= dim < x.dim():
        return INVALID
    dim %= x.dim()
    sizes = zip(index.shape, x.shape, strict=True)
    if any(n > have for i, (n, have) in enumerate(sizes) if i != dim) or any_outside(index, 0, x.shape[dim]):
        return INVALID
    return gather(x, index, dim) if gatherable(x, index, dim, False) else STRIDES


def _index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    if x.dtype.itemsize > 8 or index.dtype not in _INDICES:
        return DTYPE
    if x.dim() == 0 or index.dim() != 1:
        return RANK
    if x.numel() == 0 or index.numel() == 0:
        return EMPTY
    if not -x.dim() <= dim < x.dim() or any_outside(index, 0, x.shape[dim]):
        return INVALID
    dim %= x.dim()
    return gather(x, index, dim, select=True) if gatherable(x, index, dim, True) else STRIDES


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if weight.dtype not in FLOATS or indices.dtype not in _INDICES:
        return DTYPE
    if weight.dim() != 2:
        return RANK
    if weight.numel() == 0 or indices.numel() == 0:
        return EMPTY
    if any_outside(indices, 0, weight.shape[0]):
        return INVALID
    if not indices.is_contiguous() or weight.stride(1) != 1:
        from rtkernels.ops.index.embedding import FORWARD  # not before the first call: `enable` is to be quick

        return FORWARD.launch(weight, indices, 0)
    return gather(weight, indices.view(-1), 0, select=True).view(*indices.shape, weight.shape[1])


def _embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    if scale_grad_by_freq:
        return OPTION
    if grad_output.dtype not in FLOATS or indices.dtype not in _INDICES:
        return DTYPE
    if grad_output.numel() == 0 or num_weights == 0 or grad_output.shape[:-1] != indices.shape:
        return EMPTY
    if (
        grad_output.is_contiguous()
        and indices.is_contiguous()
        and not (indices.is_cpu and any_outside(indices, 0, num_weights))
    ):
        index, source = indices.view(-1), grad_output.view(indices.numel(), -1)
        if addable((num_weights, source.shape[1]), index, source, 0, reads=False):
            return sum_rows(index, source, num_weights, padding_idx)
    from rtkernels.ops.index.embedding import BACKWARD

    return BACKWARD.launch(grad_output, indices, num_weights, 0, padding_idx)


def _add_rows(
    x: Tensor, dim: int, index: Tensor, source: Tensor, in_place: bool, *, alpha: float = 1, from_end: bool = False
) -> Any:
    """Add slices of `source` to those of x, or of a copy of it, that an index of one dimension names along `dim`."""
    if x.dtype not in FLOATS or source.dtype != x.dtype or index.dtype not in _INDICES:
        return DTYPE
    if x.numel() == 0 or source.numel() == 0:
        return EMPTY
    if x.dim() == 1:
        return RANK  # sums of elements: torch's
    if type(alpha) not in (int, float):
        return OPTION
    shape, n = tuple(x.shape), x.shape[dim]
    if tuple(source.shape) != (*shape[:dim], index.numel(), *shape[dim + 1 :]):
        return INVALID
    if any_outside(index, -n if from_end else 0, n):
        return INVALID
    if not x.is_contiguous():
        return STRIDES
    if in_place and (may_overlap(x, source) or may_overlap(x, index)):
        return OVERLAP  # torch refuses it
    if addable(shape, index, source, dim, in_place=in_place):
        return add_rows(x, index, source, dim, from_end=from_end, alpha=float(alpha), in_place=in_place)
    if alpha != 1 or math.prod(shape[:dim]) != 1:
        return OPTION
    if from_end:
        index = run(_FROM_END, (index,), (n,))
    made = x if in_place else copy_into(x.new_empty(shape), x)
    if dim == 0 and x.dim() == 2:
        add_many_rows(made, index, source)
    else:
        add_many_rows(made.view(n, -1), index, source.reshape(index.numel(), -1))
    return made


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, in_place: bool = False) -> Any:
    if index.dim() != 1 or x.dim() == 0 or source.dim() != x.dim() or not -x.dim() <= dim < x.dim():
        return RANK
    return _add_rows(x, dim % x.dim(), index, source, in_place, alpha=alpha)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor, *, in_place: bool = False) -> Any:
    """Sums of whole rows: an index that is one number for each of them. Sums of elements are torch's."""
    rank = x.dim()
    if rank < 2 or index.dim() != rank or src.dim() != rank or dim not in (0, -rank):
        return RANK
    if x.numel() == 0 or index.numel() == 0 or src.numel() == 0:
        return EMPTY
    rest = tuple(index.shape[1:])
    one_number = all(n == 1 or step == 0 for n, step in zip(rest, index.stride()[1:], strict=True))
    if not one_number or rest != tuple(x.shape[1:]) or index.shape[0] > src.shape[0]:
        return OPTION
    if any(n > have for n, have in zip(rest, src.shape[1:], strict=True)):
        return INVALID
    for i, n in enumerate(index.shape):
        src = src if src.shape[i] == n else src.narrow(i, 0, n)
    return _add_rows(x, 0, index[(slice(None), *[0] * (rank - 1))], src, in_place)


def _only_index(x: Tensor, indices: Any) -> tuple[int, Tensor] | NotHandled:
    """Return the one tensor of indices, with its dimension; NotHandled if there are several, or a mask."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or len(indices) > x.dim():
        return SEVERAL
    dim, index = given[0]
    if index.dtype not in _INDICES or index.device != x.device:
        return DTYPE
    if x.numel() == 0 or index.numel() == 0:
        return EMPTY
    n = x.shape[dim]
    return INVALID if any_outside(index, -n, n) else (dim, index)


def _index(x: Tensor, indices: Any) -> Any:
    found = _only_index(x, indices)
    if isinstance(found, NotHandled):
        return found
    dim, index = found
    if x.dtype.itemsize > 8:
        return DTYPE
    if x.stride() != dense_strides(x.shape):
        return STRIDES  # torch's result has the order of its dimensions
    made = gather(x, index.reshape(-1), dim, select=True, from_end=True)
    return made.view((*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def add_by_index(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Sums into rows, as the gradient of ``x[index]`` asks for; torch sorts for it. Assignment is in ``scatter.py``."""
    if not accumulate:
        return OPTION
    found = _only_index(x, indices)
    if isinstance(found, NotHandled):
        return found
    dim, index = found
    if x.dtype not in FLOATS or values.dtype != x.dtype:
        return DTYPE
    if tuple(values.shape) != (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]):
        return OPTION  # broadcast
    if not (values.is_contiguous() and index.is_contiguous()):
        return STRIDES
    if index.dim() != 1:
        index, values = index.view(-1), values.view(*x.shape[:dim], index.numel(), *x.shape[dim + 1 :])
    return _add_rows(x, dim, index, values, True, from_end=True)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    yield Overload("gather", "idx", _gather, opinfo=("gather", "take_along_dim"), replays="cuda")
    yield Overload("index_select", "idx", _index_select, opinfo=("index_select",), replays="cuda")
    looked_up = ("nn.functional.embedding",)
    yield Overload("embedding", "idx", _embedding, opinfo=looked_up, replays="cuda")
    yield Overload("embedding_dense_backward", "idx", _embedding_dense_backward, opinfo=looked_up, replays="cuda")
    yield Overload("index_add", "idx", _index_add, opinfo=("index_add",), replays="cuda")
    yield Overload("index_add_", "idx", partial(_index_add, in_place=True), opinfo=("index_add",), replays="cuda")
    yield Overload("scatter_add", "idx", _scatter_add, opinfo=("scatter_add",), replays="cuda")
    yield Overload("scatter_add_", "idx", partial(_scatter_add, in_place=True), opinfo=("scatter_add",), replays="cuda")
    yield Overload("index.Tensor", "idx", _index, opinfo=("__getitem__",), replays="cuda")
    yield Overload("_index_put_impl_", "idx", add_by_index, opinfo=("index_put", "__getitem__"), replays="cuda")
