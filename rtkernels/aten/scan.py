"""Scans of aten: cumsum, cummax, cummin, nonzero, masked_select and repeat_interleave (family ``scan``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import into_out, shares_partly
from rtkernels.aten.table import CAPTURE, DTYPE, EMPTY, INVALID, OVERLAP, RANK, NotHandled, Overload, refused_rows
from rtkernels.ops.scan.compact import chosen, nonzero, repeated
from rtkernels.ops.scan.running import running
from rtkernels.ops.shared.strided import FLOATS, TOKEN
from rtkernels.runtime.launch.memory import is_capturing

_CONVERTED, _LARGE, _LONG = (NotHandled(r) for r in ("converted first", "dimension of 2^30", "dimension of 2^31"))


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and is_capturing()


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if (refused := refused_rows(x, dim, TOKEN)) is not None:
        return refused
    if dtype is not None and dtype != (x.dtype if x.dtype in FLOATS else torch.int64):
        return _CONVERTED
    return running(x, "sum", dim % x.dim())[0]


def _extreme(flip: bool) -> Callable[..., Any]:
    def handler(x: Tensor, dim: int) -> Any:
        if (refused := refused_rows(x, dim, TOKEN)) is not None:
            return refused
        return running(x, "maximum", dim % x.dim(), flip=flip) if x.shape[dim] < 2**31 else _LONG

    return handler


def _cumsum_out(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor) -> Any:
    if shares_partly(x, out):
        return OVERLAP  # torch refuses it
    return into_out(_cumsum)(x, dim, dtype=dtype, out=out)


def _nonzero(x: Tensor) -> Any:
    if x.dtype not in TOKEN:
        return DTYPE
    if not 1 <= x.dim() <= 4:
        return RANK
    if x.numel() == 0:
        return EMPTY
    if max(x.shape[1:], default=0) >= 2**30:
        return _LARGE
    return CAPTURE if _capturing(x) else nonzero(x)


def _masked_select(x: Tensor, mask: Tensor) -> Any:
    if mask.dtype != torch.bool or x.dtype.itemsize > 8:
        return DTYPE
    if x.device != mask.device:
        return INVALID
    if _capturing(x):
        return CAPTURE
    if x.shape != mask.shape:
        try:
            shape = torch.broadcast_shapes(x.shape, mask.shape)
        except RuntimeError:
            return INVALID
        x, mask = x.expand(shape), mask.expand(shape)
    return EMPTY if mask.numel() == 0 else chosen(x, mask)


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Any:
    if repeats.dtype not in (torch.int32, torch.int64) or repeats.dim() != 1:
        return INVALID
    if repeats.numel() == 0:
        return EMPTY
    if output_size is None and _capturing(repeats):
        return CAPTURE
    if output_size is not None:
        if output_size < 1:
            return EMPTY
        # Torch raises for a negative repeat, or for another sum; its CUDA kernel stops instead, as ours does.
        if not repeats.is_cuda and (bool((repeats < 0).any()) or int(repeats.sum()) != output_size):
            return INVALID
    result = repeated(repeats, output_size)
    return INVALID if result is None else result


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    yield Overload("cumsum", "scan", _cumsum, opinfo=("cumsum",), replays=True)
    yield Overload("cumsum.out", "scan", _cumsum_out)
    yield Overload("cummax", "scan", _extreme(False), opinfo=("cummax",), replays=True)
    yield Overload("cummin", "scan", _extreme(True), opinfo=("cummin",), replays=True)
    yield Overload("nonzero", "scan", _nonzero, opinfo=("nonzero",))
    yield Overload("masked_select", "scan", _masked_select, opinfo=("masked_select",))
    yield Overload("repeat_interleave.Tensor", "scan", _repeat_interleave, opinfo=("repeat_interleave",))
