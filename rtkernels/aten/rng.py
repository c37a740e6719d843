"""Random operators of aten: factories, fills and dropout (family ``rng``).

The same seed of torch's generator gives the same numbers each time, also in replayed graphs, but not the numbers that
torch's own kernels give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.table import DTYPE, EMPTY, INVALID, OPTION, STRIDES, NotHandled, Overload
from rtkernels.ops.random.philox import FLOATS, dropout, fill, is_packed
from rtkernels.runtime.launch.memory import is_capturing


def _refused(x: Tensor, generator: torch.Generator | None = None) -> NotHandled | None:
    if x.dtype not in FLOATS:
        return DTYPE
    if generator is not None and generator.device.type != x.device.type:
        return INVALID
    if x.numel() == 0:
        return EMPTY
    return None if is_packed(x.shape, x.stride()) else STRIDES


def _uniform_(x: Tensor, *args: float, generator: torch.Generator | None = None, **named: float) -> Any:
    low, high = (*args, *(0.0, 1.0)[len(args) :])
    low, high = named.get("from", low), named.get("to", high)
    limit = torch.finfo(x.dtype).max if x.is_floating_point() else 0.0
    if not (-limit <= low <= high <= limit and high - low <= limit):
        return INVALID
    return _refused(x, generator) or fill(x, "uniform", low, high, generator)


def _normal_(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> Any:
    return _refused(x, generator) or (fill(x, "normal", mean, std, generator) if std >= 0 else INVALID)


def _exponential_(x: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Any:
    return _refused(x, generator) or (fill(x, "exponential", lambd, 0.0, generator) if 0 < lambd < 1e38 else INVALID)


def _bernoulli_(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Any:
    return _refused(x, generator) or (fill(x, "bernoulli", p, 0.0, generator) if 0 <= p <= 1 else INVALID)


def _factory(kind: str) -> Callable[..., Any]:
    def handler(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
        if layout not in (None, torch.strided) or pin_memory:
            return OPTION
        if any(n < 0 for n in size) or (dtype or torch.get_default_dtype()) not in FLOATS:
            return DTYPE
        out = torch.empty(size, dtype=dtype, device=device)
        return fill(out, kind, 0.0, 1.0) if out.numel() else out

    return handler


def _like(kind: str) -> Callable[..., Any]:
    def handler(
        x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Any:  # fmt: skip
        if (
            layout not in (None, torch.strided)
            or pin_memory
            or (device is not None and torch.device(device) != x.device)
        ):
            return OPTION
        if (dtype or x.dtype) not in FLOATS:
            return DTYPE
        out = torch.empty_like(x, dtype=dtype, memory_format=memory_format or torch.preserve_format)
        return _refused(out) or fill(out, kind, 0.0, 1.0)

    return handler


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if train is False or not 0 < p < 1:  # of 1 torch makes zeros, of NaN as well
        return OPTION
    return _refused(x) or dropout(x, p)


def _normal(mean: Tensor | float, std: Tensor | float = 1.0, *, generator: torch.Generator | None = None) -> Any:
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    like = tensors[0]
    if any(t.dtype != like.dtype or t.device != like.device for t in tensors):
        return DTYPE
    if like.dtype not in FLOATS:
        return DTYPE
    if isinstance(std, Tensor):  # which torch reads, too
        if (std.is_cuda and is_capturing()) or (std.numel() and not bool(std.min() >= 0)):
            return INVALID
    elif not std >= 0:
        return INVALID
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return INVALID
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    return _refused(out, generator) or fill(out, "normal", 0.0, 1.0, generator).mul_(std).add_(mean)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    yield Overload("uniform_", "rng", _uniform_)
    yield Overload("normal_", "rng", _normal_)
    yield Overload("exponential_", "rng", _exponential_)
    yield Overload("bernoulli_.float", "rng", _bernoulli_)
    yield Overload("rand", "rng", _factory("uniform"))
    yield Overload("randn", "rng", _factory("normal"))
    yield Overload("rand_like", "rng", _like("uniform"))
    yield Overload("randn_like", "rng", _like("normal"))
    yield Overload("native_dropout", "rng", _native_dropout)
    for form in ("Tensor_Tensor", "Tensor_float", "float_Tensor"):
        yield Overload(f"normal.{form}", "rng", _normal)
