"""Reductions of aten: sums, means, products, extremes, any, all, counts, norms and variances (family ``red``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import copy_into
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


def _sum_like(monoid: str) -> Callable[..., Any]:
    def handler(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        dims = _reduced(x, dim)
        if type(dims) is NotHandled:
            return dims
        natural = x.dtype if x.dtype in FLOATS else torch.int64
        wanted = dtype or natural
        if wanted != natural and not (x.dtype in FLOATS and wanted == torch.float32):
            return _CONVERTED
        return reduce(x, monoid, dims, keepdim, wanted)

    return handler


_sum, _prod = _sum_like("sum"), _sum_like("product")


def _sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(x, None, dtype=dtype)


def _prod_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _prod(x, None, dtype=dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    dims = _reduced(x, dim)
    if type(dims) is NotHandled:
        return dims
    wanted = dtype or x.dtype
    if x.dtype not in FLOATS or (wanted != x.dtype and wanted != torch.float32):
        return _CONVERTED
    return reduce(x, "sum", dims, keepdim, wanted, finish="divide", number=_count(x, dims))


def _mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _mean(x, None, dtype=dtype)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _extreme(lift: str) -> Callable[..., Any]:
    def handler(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
        dims = _reduced(x, dim)
        if type(dims) is NotHandled:
            return dims
        return reduce(x, "maximum", dims, keepdim, x.dtype, lift=lift)

    return handler


_amax, _amin = _extreme("value"), _extreme("flip")


def _max_all(x: Tensor) -> Any:
    return _amax(x)


def _min_all(x: Tensor) -> Any:
    return _amin(x)


def _extreme_dim(lift: str) -> Callable[..., Any]:
    def handler(x: Tensor, dim: int, keepdim: bool = False) -> Any:
        dims = _reduced(x, dim, ordered=True)
        if type(dims) is NotHandled:
            return dims
        return reduce(x, "arg_maximum", dims, keepdim, x.dtype, lift=lift, wanted="os")

    return handler


def _arg(lift: str) -> Callable[..., Any]:
    def handler(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if x.dtype == torch.bool:
            return DTYPE
        dims = _reduced(x, dim, ordered=True)
        if type(dims) is NotHandled:
            return dims
        return reduce(x, "arg_maximum", dims, keepdim, x.dtype, lift=lift, wanted="s")

    return handler


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


def _count_nonzero(x: Tensor, dim: Any = None) -> Any:
    dims = _reduced(x, dim)
    if type(dims) is NotHandled:
        return dims
    return reduce(x, "count", dims, False, torch.int64, lift="nonzero")


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
    def handler(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
        dims = _reduced(x, dim)
        if type(dims) is NotHandled:
            return dims
        if x.dtype not in FLOATS:
            return DTYPE
        divisor = max(_count(x, dims) - (1 if correction is None else correction), 0)
        if divisor == 0:
            return _REASONS["empty"]  # no degree of freedom: torch warns
        return reduce(x, "moments", dims, keepdim, x.dtype, finish=finish, number=divisor, wanted=wanted)

    return handler


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


def _into(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``out=`` form of a handler, for an `out` that has the result's shape and dtype already."""

    def into(*args: Any, out: Tensor, **kwargs: Any) -> Any:
        made = handler(*args, **kwargs)
        if isinstance(made, NotHandled):
            return made
        fits = (out.shape, out.dtype, out.device) == (made.shape, made.dtype, made.device)
        return copy_into(out, made) if fits else INVALID

    return into


def _trace(x: Tensor) -> Any:
    return _sum(x.diagonal(), None) if x.dim() == 2 else INVALID


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""

    def row(name: str, handler: Callable[..., Any], *opinfo: str) -> Overload:
        return Overload(name, "red", handler, opinfo=opinfo, replays=name != "allclose")  # which waits for its result

    yield row("sum", _sum_all, "sum")
    yield row("sum.dim_IntList", _sum, "sum")
    yield row("mean", _mean_all, "mean")
    yield row("mean.dim", _mean, "mean")
    yield row("prod", _prod_all, "prod")
    yield row("prod.dim_int", _prod, "prod")
    yield row("amax", _amax, "amax")
    yield row("amin", _amin, "amin")
    yield row("max", _max_all, "max")
    yield row("min", _min_all, "min")
    yield row("max.dim", _extreme_dim("value"), "max")
    yield row("min.dim", _extreme_dim("flip"), "min")
    yield row("argmax", _arg("value"), "argmax")
    yield row("argmin", _arg("flip"), "argmin")
    for name in ("any", "all"):
        handler = truth(name)
        yield row(name, lambda x, handler=handler: handler(x), name)
        yield row(f"{name}.dim", handler, name)
        yield row(f"{name}.dims", handler, name)
    yield row("count_nonzero.dim_IntList", _count_nonzero, "count_nonzero")
    yield row("count_nonzero", _count_nonzero, "count_nonzero")
    yield row("linalg_vector_norm", _vector_norm, "linalg.vector_norm")
    yield row("var.correction", _moments("value", "o"), "var")
    yield row("std.correction", _moments("root", "o"), "std")
    yield row("var_mean.correction", _moments("value", "os"), "var_mean")
    yield row("std_mean.correction", _moments("root", "os"), "std_mean")
    yield row("sum.out", _into(_sum_all))
    yield row("sum.IntList_out", _into(_sum))
    yield row("trace", _trace, "trace")
    yield row("mse_loss", _mse_loss, "nn.functional.mse_loss")
    yield row("allclose", _allclose, "allclose")
