"""Reductions of aten: sums, means, products, extremes, any, all, counts, norms and variances (family ``red``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import into_out
from rtkernels.aten.table import CAPTURE, DTYPE, INVALID, NotHandled, Overload
from rtkernels.ops.reduce.pairs import all_close, squared_error
from rtkernels.ops.reduce.reduction import FLOATS, reduce, reducible

_CONVERTED = NotHandled("converted first")
_REASONS = {
    reason: NotHandled(reason)
    for reason in ("empty", "strides", *(f"dtype {str(t).removeprefix('torch.')}" for t in (
        torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.int8, torch.int16)))
}  # fmt: skip


def _dims(rank: int, dim: Any) -> tuple[int, ...] | None:
    """Return the reduced dimensions, at least 0; None and an empty list mean all. None: invalid ones."""
    if dim is None or dim == ():
        return tuple(range(rank))
    listed = (dim,) if isinstance(dim, int) else dim
    if rank == 0:
        return () if all(d in (0, -1) for d in listed) and len(listed) == 1 else None
    if any(not -rank <= d < rank for d in listed):
        return None
    found = tuple(sorted(d % rank for d in listed))
    return found if len(set(found)) == len(found) else None


@lru_cache(4096)
def _prepare(dtype: torch.dtype, shape: Any, stride: Any, dim: Any, ordered: bool) -> tuple[int, ...] | NotHandled:
    dims = _dims(len(shape), dim)
    if dims is None:
        return INVALID
    reason = reducible(dtype, shape, stride, dims, ordered=ordered)
    return dims if reason is None else _REASONS.get(reason, DTYPE)


def _reduced(x: Tensor, dim: Any, *, ordered: bool = False) -> tuple[int, ...] | NotHandled:
    """Return the dimensions that a call reduces, or why torch has to do it."""
    if dim is not None and type(dim) is not int:
        dim = tuple(dim)
    return _prepare(x.dtype, x.shape, x.stride(), dim, ordered)


def _over(reduced: Callable[..., Any], *, ordered: bool = False) -> Callable[..., Any]:
    """Return the handler of overloads with and without dimensions, given a function of the reduced dimensions."""

    def handler(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        dims = _reduced(x, dim, ordered=ordered)
        return dims if type(dims) is NotHandled else reduced(x, dims, keepdim, **options)

    return handler


def _sum_like(monoid: str) -> Callable[..., Any]:
    def reduced(x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None = None) -> Any:
        natural = x.dtype if x.dtype in FLOATS else torch.int64
        wanted = dtype or natural
        if wanted != natural and not (x.dtype in FLOATS and wanted == torch.float32):
            return _CONVERTED
        return reduce(x, monoid, dims, keepdim, wanted)

    return _over(reduced)


_sum, _prod = _sum_like("sum"), _sum_like("product")


@_over
def _mean(x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None = None) -> Any:
    wanted = dtype or x.dtype
    if x.dtype not in FLOATS or (wanted != x.dtype and wanted != torch.float32):
        return _CONVERTED
    return reduce(x, "sum", dims, keepdim, wanted, finish="divide", number=_count(x, dims))


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _extreme(lift: str, monoid: str = "maximum", wanted: str = "o") -> Callable[..., Any]:
    def reduced(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Any:
        if wanted == "s" and x.dtype == torch.bool:
            return DTYPE
        return reduce(x, monoid, dims, keepdim, x.dtype, lift=lift, wanted=wanted)

    return _over(reduced, ordered=monoid == "arg_maximum")


def truth(finish: str) -> Callable[..., Any]:
    """Return the handler of "any" or "all"."""

    def handler(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, (list, tuple)) and not dim:
            return INVALID  # torch's overloads differ
        dims = _reduced(x, dim)
        if type(dims) is NotHandled:
            return dims
        wanted = torch.uint8 if x.dtype == torch.uint8 else torch.bool
        number = _count(x, dims)
        return reduce(x, "count", dims, keepdim, wanted, lift="nonzero", finish=finish, number=number)

    return handler


@_over
def _count_nonzero(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Any:
    return reduce(x, "count", dims, keepdim, torch.int64, lift="nonzero")


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dims = _reduced(x, dim)
    if type(dims) is NotHandled:
        return dims
    wanted = dtype or x.dtype
    if x.dtype not in FLOATS or (wanted != x.dtype and wanted != torch.float32) or isinstance(ord, complex):
        return _CONVERTED
    if ord != 0 and _count(x, dims) == 1:
        ord = math.inf  # the magnitude itself, as torch: a power may overflow
    if ord == math.inf or ord == -math.inf:
        return reduce(x, "maximum", dims, keepdim, wanted, lift="abs" if ord > 0 else "flip_abs")
    if ord == 0:
        return reduce(x, "sum", dims, keepdim, wanted, lift="nonzero")
    if ord == 1:
        return reduce(x, "sum", dims, keepdim, wanted, lift="abs")
    if ord == 2:
        return reduce(x, "sum", dims, keepdim, wanted, lift="square", finish="root")
    return reduce(x, "sum", dims, keepdim, wanted, lift="power", power=ord, finish="power", number=1 / ord)


def _moments(finish: str, wanted: str) -> Callable[..., Any]:
    def reduced(x: Tensor, dims: tuple[int, ...], keepdim: bool, correction: float | None = None) -> Any:
        if x.dtype not in FLOATS:
            return DTYPE
        divisor = max(_count(x, dims) - (1 if correction is None else correction), 0)
        if divisor == 0:
            return _REASONS["empty"]  # no degree of freedom: torch warns
        return reduce(x, "moments", dims, keepdim, x.dtype, finish=finish, number=divisor, wanted=wanted)

    return _over(reduced)


def _mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Any:
    if x.dtype not in FLOATS or target.dtype != x.dtype:
        return DTYPE
    if x.numel() == 0:
        return _REASONS["empty"]
    if x.shape != target.shape or reduction not in (1, 2):  # broadcast, or no reduction
        return INVALID
    return squared_error(x, target, reduction == 1)


def _allclose(x: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    if x.dtype != torch.float32 or other.dtype != torch.float32:
        return DTYPE
    if x.numel() == 0:
        return _REASONS["empty"]
    if x.shape != other.shape or x.device != other.device or rtol < 0 or atol < 0:
        return INVALID
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return CAPTURE
    return all_close(x, other, rtol, atol, equal_nan)


def _trace(x: Tensor) -> Any:
    return _sum(x.diagonal()) if x.dim() == 2 else INVALID


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""

    def row(name: str, handler: Callable[..., Any], *opinfo: str) -> Overload:
        return Overload(name, "red", handler, opinfo=opinfo, replays=name != "allclose")  # which waits for its result

    yield row("sum", _sum, "sum")
    yield row("sum.dim_IntList", _sum, "sum")
    yield row("mean", _mean, "mean")
    yield row("mean.dim", _mean, "mean")
    yield row("prod", _prod, "prod")
    yield row("prod.dim_int", _prod, "prod")
    for which, lift in (("max", "value"), ("min", "flip")):
        yield row(f"a{which}", _extreme(lift), f"a{which}")
        yield row(which, _extreme(lift), which)
        yield row(f"{which}.dim", _extreme(lift, "arg_maximum", "os"), which)
        yield row(f"arg{which}", _extreme(lift, "arg_maximum", "s"), f"arg{which}")
    for name in ("any", "all"):
        for overload in (name, f"{name}.dim", f"{name}.dims"):
            yield row(overload, truth(name), name)
    yield row("count_nonzero.dim_IntList", _count_nonzero, "count_nonzero")
    yield row("count_nonzero", _count_nonzero, "count_nonzero")
    yield row("linalg_vector_norm", _vector_norm, "linalg.vector_norm")
    yield row("var.correction", _moments("value", "o"), "var")
    yield row("std.correction", _moments("root", "o"), "std")
    yield row("var_mean.correction", _moments("value", "os"), "var_mean")
    yield row("std_mean.correction", _moments("root", "os"), "std_mean")
    yield row("sum.out", into_out(_sum))
    yield row("sum.IntList_out", into_out(_sum))
    yield row("trace", _trace, "trace")
    yield row("mse_loss", _mse_loss, "nn.functional.mse_loss")
    yield row("allclose", _allclose, "allclose")
