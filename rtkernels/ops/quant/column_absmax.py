"""Largest magnitudes of columns: calibration of quantisers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    FLOAT_DTYPES,
    address,
    check_same,
    metadata,
    passing,
    row_count,
    row_stride,
    rowed,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

_BLOCKS_PER_SM = 4
_WARPS = 8
_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = {None: "AbsMax", torch.float8_e4m3fn: "ScaleE4m3", torch.float8_e5m2: "ScaleE5m2"}

_PARTIAL = Kernel(
    "quant/column_absmax.cu",
    "column_absmax",
    template="T",
    args="x:ptr row_factor:ptr column_factor:ptr partial:ptr rows:i64 cols:i64 x_stride:i64 rows_per_block:i64 "
    "column_tiles:i64 wide:i64 passing:i64",
    variants=[("bf16",), ("fp16",), ("fp32",)],
    max_registers=128,
)
_FINISH = Kernel(
    "quant/column_absmax.cu",
    "column_max",
    template="Result",
    args="partial:ptr out:ptr rows:i64 cols:i64 pow2:i64",
    variants=[(name,) for name in _RESULTS.values()],
    max_registers=40,
)

# ---- launchers ------------------------------------------------------------------------------------------------------


def check_factor(name: str, factor: tuple[Any, ...] | None, size: int, device: int, what: str) -> None:
    """Raise an ArgumentError unless an optional factor is fp32 of one dimension of `size`."""
    if factor is None:
        return
    token(name, factor[0], (torch.float32,))
    if tuple(factor[1]) != (size,):
        raise ArgumentError(f"{name} has shape {tuple(factor[1])}; expected {(size,)}, one per {what} of x")
    check_same(name, factor[3], device, "device index")


def _check(x: tuple[Any, ...], row: tuple[Any, ...] | None, column: tuple[Any, ...] | None) -> str:
    t = token("x", x[0], _DTYPES)
    if not x[1]:
        raise ArgumentError("x has no dimensions; expected at least one")
    check_factor("row_factor", row, row_count(x[1]), x[3], "row")
    check_factor("column_factor", column, x[1][-1], x[3], "column")
    return t


def _plan(x, row, column, result: torch.dtype | None, align: int):
    t = _check(x, row, column)
    if 0 in x[1]:
        return None
    rows, cols, stride = row_count(x[1]), x[1][-1], row_stride(x[1], x[2])
    size, device = x[0].itemsize, x[3]
    wide = vector_bytes(align, cols * size, stride * size) == 16
    tiles = -(-cols // (32 * (16 // size if wide else 1)))
    splits = max(1, min(_BLOCKS_PER_SM * device_info(device).sm_count // tiles, -(-rows // (8 * _WARPS))))
    each = -(-rows // splits)
    splits = -(-rows // each)
    partial = _PARTIAL.bind((t,), device, tiles * splits, 32 * _WARPS)
    finish = _FINISH.bind((_RESULTS[result],), device, -(-cols // 32), 32 * _WARPS, overlap=True)
    leaving = result is None and passing(rows * cols * size)  # what scales are made for reads x again
    return partial, (rows, cols, stride, each, tiles, wide, leaving), finish, splits, cols


_PLANS = Plans(_plan)
_FINISH_PLANS = Plans(
    lambda device, result, cols: _FINISH.bind((_RESULTS[result],), device, -(-cols // 32), 32 * _WARPS, overlap=True)
)


def column_scales(
    x: Tensor, row_factor: Tensor | None, column_factor: Tensor | None, result: torch.dtype | None, pow2: bool
) -> Tensor | None:
    """Return the fp8 scales of the columns (dtype `result`) or, for None, their largest magnitudes.

    Factors must be dense. None if x has no elements. Launches device code.
    """
    if x.itemsize == 1 and x.dtype in _DTYPES:
        x = x.to(torch.bfloat16)  # exact
    x = rowed(x) if x.dim() else x
    plan = _PLANS[metadata(x), metadata(row_factor), metadata(column_factor), result, x.data_ptr() & 15]
    if plan is None:
        return None
    first, args, finish, splits, cols = plan
    partial = torch.empty((splits, cols), dtype=torch.float32, device=x.device)
    out = torch.empty(cols, dtype=torch.float32, device=x.device)
    first(x.data_ptr(), address(row_factor), address(column_factor), partial.data_ptr(), *args)
    finish(partial.data_ptr(), out.data_ptr(), splits, cols, pow2)
    return out


def column_max(partial: Tensor) -> Tensor:
    """Return the largest numbers of the columns of a dense fp32 matrix of magnitudes. Launches device code."""
    rows, cols = partial.shape
    out = torch.empty(cols, dtype=torch.float32, device=partial.device)
    _FINISH_PLANS[partial.get_device(), None, cols](partial.data_ptr(), out.data_ptr(), rows, cols, 0)
    return out


def _launch(x: Tensor, row_factor: Tensor | None, column_factor: Tensor | None) -> Tensor:
    row, column = (None if f is None else f.contiguous() for f in (row_factor, column_factor))
    out = column_scales(x, row, column, None, False)
    return torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device) if out is None else out


def reference(x: Tensor, row_factor: Tensor | None, column_factor: Tensor | None) -> Tensor:
    """Return the largest finite magnitudes in plain torch."""
    _check(metadata(x), metadata(row_factor), metadata(column_factor))
    if x.numel() == 0:
        return torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    z = x.float().reshape(-1, x.shape[-1])
    if column_factor is not None:
        z = z * column_factor
    if row_factor is not None:
        z = z * row_factor[:, None]
    return torch.where(z.isfinite(), z.abs(), 0.0).amax(0)


def _fake(x, row_factor, column_factor):
    return x.new_empty(x.shape[-1], dtype=torch.float32)


ABSMAX = TorchOp(
    "column_absmax(Tensor x, Tensor? row_factor, Tensor? column_factor) -> Tensor",
    launch=_launch,
    reference=reference,
    fake=_fake,
)


# ---- public ---------------------------------------------------------------------------------------------------------


def column_absmax(x: Tensor, *, row_factor: Tensor | None = None, column_factor: Tensor | None = None) -> Tensor:
    """Return the largest finite magnitude of each column, of ``x * column_factor * row_factor``.

    NaN and infinities do not count, as in :func:`quantize_fp8`; a column without a finite value has 0. With factors,
    fp8 codes can be looked at as the values they stand for. Not differentiable.

    Args:
        x: ``[..., n]``, at least one dimension; bfloat16, float16 or float32, or float8_e4m3fn or float8_e5m2 (which
            are converted first). Any strides (a copy is made unless rows are unit-stride and evenly spaced). May be any
            object with ``__dlpack__``; the result is then of its kind.
        row_factor: float32, one per row (leading dimensions flattened), or None.
        column_factor: float32 ``[n]``, or None.

    Returns:
        ``[n]``, float32.
    """
    if not isinstance(x, Tensor):
        return interop.call(column_absmax, x, row_factor=row_factor, column_factor=column_factor)
    x, row, column = detached(x, row_factor, column_factor)
    return ABSMAX(x, row, column)


OP = Op(
    "column_absmax",
    public=("column_absmax",),
    kernels=(_PARTIAL, _FINISH),
    torch_ops=(ABSMAX,),
)
