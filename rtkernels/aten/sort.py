"""Sorting of aten: sort, topk, unique, isin (family ``sort``); argsort and others are composites of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import rounded, run
from rtkernels.aten.table import CAPTURE, DTYPE, EMPTY, INVALID, STRIDES, NotHandled, Overload, refused_rows
from rtkernels.ops.scan.compact import distinct
from rtkernels.ops.shared.strided import FLOATS, TOKEN
from rtkernels.ops.sort.search import is_among
from rtkernels.ops.sort.sorting import LONGEST, PLACES, best_of_rows, sort_rows

_LONG, _MANY = NotHandled("rows too long"), NotHandled("k above 256")
_INEXACT = NotHandled("a number that the dtype cannot represent")


def _rows_of(x: Tensor, dim: int) -> Tensor | NotHandled:
    """Return x as (rows, n) with `dim` as the row, dense."""
    if (refused := refused_rows(x, dim, TOKEN)) is not None:
        return refused
    n = x.shape[dim]
    return _LONG if n > LONGEST else x.movedim(dim, -1).reshape(-1, n)


def _sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
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


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    rows = _rows_of(x, dim)
    if isinstance(rows, NotHandled):
        return rows
    if x.dtype == torch.bool:
        return DTYPE
    n = x.shape[dim]
    if not 1 <= k <= n:
        return INVALID if k else EMPTY
    if k > 256 and n > PLACES:
        return _MANY
    moved = x.movedim(dim, -1).shape[:-1]
    if largest and k <= 64 and n <= 8192 and x.dtype in FLOATS:
        from rtkernels.ops.router.topk import FORWARD  # not before the first call: `enable` is to be quick

        made = FORWARD.launch(rows, k, True)
    else:
        made = best_of_rows(rows, k, largest)
    if dim in (-1, x.dim() - 1):
        return tuple(result.view(*moved, k) for result in made)
    dense = torch.contiguous_format
    return tuple(result.view(*moved, k).movedim(-1, dim).clone(memory_format=dense) for result in made)


def _unique2(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    if x.dtype not in TOKEN or x.dtype == torch.bool:  # torch counts bools without a sort, and returns other things
        return DTYPE
    n = x.numel()
    if n == 0:
        return EMPTY
    if n > LONGEST:
        return _LONG
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return CAPTURE
    ordered, order = sort_rows(x.reshape(1, -1), False, return_inverse)
    ordered = ordered.view(-1)
    values, begins = distinct(ordered, places=return_counts)
    inverse, counts = (torch.empty(0, dtype=torch.int64, device=x.device) for _ in range(2))
    if return_inverse:
        first = torch.ones(n, dtype=torch.bool, device=x.device)
        torch.ne(ordered[1:], ordered[:-1], out=first[1:])
        inverse = torch.empty_like(order.view(-1)).scatter_(0, order.view(-1), first.cumsum(0) - 1).view(x.shape)
    if return_counts:
        counts = torch.diff(begins, append=begins.new_full((1,), n))
    return values, inverse, counts


def _isin(elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Any:
    if elements.dtype not in TOKEN or test_elements.dtype != elements.dtype or elements.dtype == torch.bool:
        return DTYPE
    if elements.numel() == 0 or test_elements.numel() == 0:
        return EMPTY
    if elements.device != test_elements.device:
        return INVALID
    if not test_elements.is_contiguous():
        return STRIDES  # torch views them as one dimension, and raises where it cannot
    return _LONG if test_elements.numel() > LONGEST else is_among(elements, test_elements, invert)


def _isin_number(elements: Tensor, test_element: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    if type(test_element) not in (int, float) or elements.dtype == torch.bool:
        return DTYPE
    from rtkernels.aten.pointwise import COMPARISONS

    out = None if elements.is_contiguous() else torch.empty(elements.shape, dtype=torch.bool, device=elements.device)
    return run(COMPARISONS["ne" if invert else "eq"], (elements, test_element), out=out)


def _number_isin(element: Any, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """Compare, then reduce: any element is equal, or, inverted, all are different."""
    if type(element) not in (int, float) or test_elements.dtype not in TOKEN or test_elements.dtype == torch.bool:
        return DTYPE
    if test_elements.numel() == 0:
        return EMPTY
    if not test_elements.is_contiguous():
        return STRIDES
    if test_elements.dtype in FLOATS:
        if rounded(element, test_elements.dtype) != element:
            return _INEXACT  # torch compares as double or as float, depending on the number of elements
    elif type(element) is float:
        return DTYPE
    from rtkernels.aten.pointwise import COMPARISONS
    from rtkernels.aten.reduce import truth

    found = run(COMPARISONS["ne" if invert else "eq"], (test_elements, element))
    return found if isinstance(found, NotHandled) else truth("all" if invert else "any")(found)


def _randperm(
    n: int, *, dtype: Any = torch.int64, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    if layout not in (None, torch.strided) or pin_memory or dtype not in (None, torch.int64):
        return INVALID
    if not 0 < n <= LONGEST:
        return EMPTY
    keys = torch.empty(1, n, dtype=torch.int64, device=device).random_()
    return sort_rows(keys, False)[1].view(-1)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    yield Overload("sort", "sort", _sort, opinfo=("msort",), replays=True)
    # Which of equal elements comes first is free without `stable`, and in topk: torch's samples compare indices.
    yield Overload("sort.stable", "sort", _sort, replays=True)
    yield Overload("topk", "sort", _topk, replays=True)
    yield Overload("_unique2", "sort", _unique2, opinfo=("unique",))
    yield Overload("randperm", "sort", _randperm)
    yield Overload("isin.Tensor_Tensor", "sort", _isin, opinfo=("isin",), replays=True)
    yield Overload("isin.Tensor_Scalar", "sort", _isin_number, opinfo=("isin",), replays=True)
    yield Overload("isin.Scalar_Tensor", "sort", _number_isin, opinfo=("isin",), replays=True)
