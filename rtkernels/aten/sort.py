"""Sorting of aten: sort, topk (family ``sort``); argsort and others are composites of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.table import NotHandled, Overload
from rtkernels.ops.router.topk import FORWARD as TOPK
from rtkernels.ops.shared.strided import FLOATS, TOKEN
from rtkernels.ops.sort.sorting import PLACES, best_of_rows, sort_rows

_INVALID, _DTYPE, _EMPTY, _RANK = (
    NotHandled(reason) for reason in ("invalid arguments", "dtype", "empty", "no dimensions")
)
_LONG, _MANY = NotHandled("rows too long"), NotHandled("k above 256")


def _rows_of(x: Tensor, dim: int) -> Tensor | NotHandled:
    """Return x as (rows, n) with `dim` as the row, dense."""
    if x.dtype not in TOKEN:
        return _DTYPE
    if x.numel() == 0:
        return _EMPTY
    if x.dim() == 0:
        return _RANK
    if not -x.dim() <= dim < x.dim():
        return _INVALID
    n = x.shape[dim]
    return _LONG if n >= 2**31 else x.movedim(dim, -1).reshape(-1, n)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    rows = _rows_of(x, dim)
    if isinstance(rows, NotHandled):
        return rows
    moved = x.movedim(dim, -1)
    values, indices = (made.view(moved.shape) for made in sort_rows(rows, descending))
    strides = torch.empty_like(x, device="meta").stride()
    if moved.shape == x.shape and values.stride() == strides and dim in (-1, x.dim() - 1):
        return values, indices
    made = []
    for result in (values, indices):
        out = torch.empty_strided(x.shape, strides, dtype=result.dtype, device=x.device)
        made.append(out.copy_(result.movedim(-1, dim)))
    return tuple(made)


def _sort_stable(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(x, dim, descending)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    rows = _rows_of(x, dim)
    if isinstance(rows, NotHandled):
        return rows
    if x.dtype == torch.bool:
        return _DTYPE
    n = x.shape[dim]
    if not 1 <= k <= n:
        return _INVALID if k else _EMPTY
    if k > 256 and n > PLACES:
        return _MANY
    moved = x.movedim(dim, -1).shape[:-1]
    if largest and k <= 64 and n <= 8192 and x.dtype in FLOATS:
        made = TOPK.call(rows, k, True)
    else:
        made = best_of_rows(rows, k, largest)
    if dim in (-1, x.dim() - 1):
        return tuple(result.view(*moved, k) for result in made)
    dense = torch.contiguous_format
    return tuple(result.view(*moved, k).movedim(-1, dim).clone(memory_format=dense) for result in made)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    yield Overload("sort", "sort", _sort, default=True, opinfo=("sort", "argsort", "msort"))
    yield Overload("sort.stable", "sort", _sort_stable, default=True, opinfo=("sort",))
    yield Overload("topk", "sort", _topk, default=True, opinfo=("topk",))
