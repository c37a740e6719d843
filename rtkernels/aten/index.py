"""Indexing of aten: gather, index_select, embedding and its gradient, sums into rows (family ``idx``).

Sums are deterministic: rows that share an index are added in fp32 in a fixed order, without atomics. Other scatters
are torch's. An index outside of its dimension stops gather's and index_select's kernel, as it stops torch's; a look-up
of an embedding gives zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import run
from rtkernels.aten.functors import functor
from rtkernels.aten.table import NotHandled, Overload
from rtkernels.ops.index.gathering import gather, gatherable
from rtkernels.ops.shared.strided import FLOATS
from rtkernels.runtime.operator.tape import noted

_INVALID, _DTYPE, _EMPTY, _RANK, _STRIDES, _OPTION = (
    NotHandled(reason) for reason in ("invalid arguments", "dtype", "empty", "rank", "strides", "option")
)
_SEVERAL = NotHandled("several indices, or a mask")
_INDICES = (torch.int32, torch.int64)
_FROM_END = functor("FromEnd", 1, dtypes=frozenset(_INDICES))


@cache
def _embedding_operators() -> Any:  # imported by the first call: `enable` is to be quick
    from rtkernels.ops.index import embedding

    return embedding


@cache
def _scatter_into() -> Any:
    from rtkernels.ops.index.row_moves_operators import SCATTER_INTO

    return SCATTER_INTO


def _outside(index: Tensor, n: int) -> bool:
    """Return True for an index that torch's CPU kernel refuses; on a CUDA device nothing is read."""
    return not index.is_cuda and bool(((index < 0) | (index >= n)).any())


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if x.dtype.itemsize > 8 or index.dtype != torch.int64:
        return _DTYPE
    if x.dim() == 0 or index.dim() != x.dim():
        return _RANK
    if x.numel() == 0 or index.numel() == 0:
        return _EMPTY
    if not -x.dim() <= dim < x.dim():
        return _INVALID
    dim %= x.dim()
    sizes = zip(index.shape, x.shape, strict=True)
    if any(n > have for i, (n, have) in enumerate(sizes) if i != dim) or _outside(index, x.shape[dim]):
        return _INVALID
    return gather(x, index, dim) if gatherable(x, index, dim, False) else _STRIDES


def _index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    if x.dtype.itemsize > 8 or index.dtype not in _INDICES:
        return _DTYPE
    if x.dim() == 0 or index.dim() != 1:
        return _RANK
    if x.numel() == 0 or index.numel() == 0:
        return _EMPTY
    if not -x.dim() <= dim < x.dim() or _outside(index, x.shape[dim]):
        return _INVALID
    dim %= x.dim()
    return gather(x, index, dim, select=True) if gatherable(x, index, dim, True) else _STRIDES


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if weight.dtype not in FLOATS or indices.dtype not in _INDICES:
        return _DTYPE
    if weight.dim() != 2:
        return _RANK
    if weight.numel() == 0 or indices.numel() == 0:
        return _EMPTY
    return _INVALID if _outside(indices, weight.shape[0]) else noted(_embedding_operators().FORWARD, weight, indices, 0)


def _embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    if scale_grad_by_freq:
        return _OPTION
    if grad_output.dtype not in FLOATS or indices.dtype not in _INDICES:
        return _DTYPE
    if grad_output.numel() == 0 or num_weights == 0 or grad_output.shape[:-1] != indices.shape:
        return _EMPTY
    return _embedding_operators().BACKWARD.call(grad_output, indices, num_weights, 0, padding_idx)


def _add_rows(x: Tensor, index: Tensor, source: Tensor, out: Tensor) -> Any:
    """Add rows of `source` to those of `out`, a copy of x or x itself, that the index names."""
    if x.dtype not in FLOATS or source.dtype != x.dtype or index.dtype not in _INDICES:
        return _DTYPE
    if x.dim() != 2 or source.dim() != 2:
        return _RANK
    if x.numel() == 0 or source.numel() == 0:
        return _EMPTY
    if source.shape[0] != index.numel() or source.shape[1] != x.shape[1] or _outside(index, x.shape[0]):
        return _INVALID
    if out is x and not x.is_contiguous():
        return _STRIDES
    made = x.clone(memory_format=torch.contiguous_format) if out is None else out
    _scatter_into().launch(made, source, index.contiguous(), None, True)
    return made


def _index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, out: Tensor | None = None
) -> Any:
    if x.dim() != 2:
        return _RANK
    if dim not in (0, -2) or alpha != 1 or index.dim() != 1:
        return _OPTION
    return _add_rows(x, index, source, out)


def _index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    return _index_add(x, dim, index, source, alpha=alpha, out=x)


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if x.dim() != 2 or index.dim() != 2 or src.dim() != 2:
        return _RANK
    whole_rows = dim in (0, -2) and (index.stride(1) == 0 or index.shape[1] == 1) and index.shape[1] == x.shape[1]
    if not whole_rows or index.shape[0] > src.shape[0] or src.shape[1] < index.shape[1]:
        return _OPTION
    return _add_rows(x, index[:, 0], src[: index.shape[0], : index.shape[1]], None)


def _only_index(x: Tensor, indices: Any) -> tuple[int, Tensor] | NotHandled:
    """Return the one tensor of indices, with its dimension; NotHandled if there are several, or a mask."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or len(indices) > x.dim():
        return _SEVERAL
    dim, index = given[0]
    if index.dtype not in _INDICES or index.device != x.device:
        return _DTYPE
    if x.numel() == 0 or index.numel() == 0:
        return _EMPTY
    n = x.shape[dim]
    return _INVALID if not index.is_cuda and bool(((index < -n) | (index >= n)).any()) else (dim, index)


def _index(x: Tensor, indices: Any) -> Any:
    found = _only_index(x, indices)
    if isinstance(found, NotHandled):
        return found
    dim, index = found
    if x.dtype.itemsize > 8:
        return _DTYPE
    if not x.is_contiguous():
        return _STRIDES  # torch's result has the order of its dimensions
    made = gather(x, index.reshape(-1), dim, select=True, from_end=True)
    return made.view((*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _index_put_impl_(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Sums into rows, as the gradient of ``x[index]`` asks for; torch sorts for it. All else is torch's."""
    if not accumulate:
        return _OPTION
    found = _only_index(x, indices)
    if isinstance(found, NotHandled):
        return found
    dim, index = found
    if x.dtype not in FLOATS or values.dtype != x.dtype:
        return _DTYPE
    if dim != 0 or x.dim() < 2 or not x.is_contiguous():
        return _STRIDES
    if tuple(values.shape) != (*index.shape, *x.shape[1:]):
        return _OPTION  # broadcast
    rows_, places = x.shape[0], index.reshape(-1)
    places = run(_FROM_END, (places,), (rows_,))
    values = values.reshape(places.numel(), -1)
    _scatter_into().launch(x.view(rows_, -1), values, places, None, True)
    return x


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    yield Overload("gather", "idx", _gather, opinfo=("gather", "take_along_dim"), replays="cuda")
    yield Overload("index_select", "idx", _index_select, opinfo=("index_select",), replays="cuda")
    yield Overload("embedding", "idx", _embedding, opinfo=("nn.functional.embedding",), replays="cuda")
    yield Overload("embedding_dense_backward", "idx", _embedding_dense_backward, opinfo=("nn.functional.embedding",))
    yield Overload("index_add", "idx", _index_add, opinfo=("index_add",))
    yield Overload("index_add_", "idx", _index_add_, opinfo=("index_add",))
    yield Overload("scatter_add", "idx", _scatter_add, opinfo=("scatter_add",))
    yield Overload("index.Tensor", "idx", _index, opinfo=("__getitem__",))
    yield Overload("_index_put_impl_", "idx", _index_put_impl_, opinfo=("index_put", "__getitem__"))
