"""fp8 with one scale per column and transposed codes: the operator behind granularity "channel"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.layout.transpose import TRANSPOSE
from rtkernels.ops.layout.transpose_plan import padded
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.column_absmax import check_factor, column_scales
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, empty_scale, groups_of, quantized_rows, tile_threads
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import FLOAT_DTYPES, address, metadata, row_count, row_stride, token, vector_bytes
from rtkernels.runtime.operator.operator import TorchOp

KERNEL = Kernel(
    "quant/channel.cu",
    "quantize_fp8_channel",
    template="T",
    args="x:ptr row_factor:ptr column_factor:ptr scale:ptr q_t:ptr rows:i64 rows_out:i64 cols:i64 x_cols:i64 "
    "x_stride:i64 tiles_across:i64",
    variants=[("bf16",), ("fp32",)],
    max_registers=128,
)
_INPUTS = (*FLOAT_DTYPES, torch.float8_e4m3fn)
_WIDER = {torch.float16: torch.float32, torch.float8_e4m3fn: torch.bfloat16}


def _check(x, row, column, dtype: torch.dtype, pad_to: int) -> None:
    token("x", x[0], _INPUTS)
    token("the result", dtype, FP8_DTYPES)
    if not x[1]:
        raise ArgumentError("x has no dimensions; expected at least one")
    if not 1 <= pad_to <= 65536:
        raise ArgumentError(f"pad_to is {pad_to}; expected 1 to 65536")
    check_factor("row_factor", row, row_count(x[1]), x[3], "row")
    check_factor("smooth", column, x[1][-1], x[3], "column")


class _Plan:
    """One launch; x is copied to rows of whole 16 bytes if `extra` says by how many columns they grow."""

    def __init__(self, x: tuple[Any, ...], t: str, pad_to: int, align: int) -> None:
        dtype, shape, stride, device = x
        size, self.cols, rows = dtype.itemsize, shape[-1], row_count(shape)
        step = row_stride(shape, stride)
        n = 16 // size
        self.extra: int | None = None
        if step is None or vector_bytes(align, self.cols * size, step * size) != 16:
            self.extra = -self.cols % n
        x_cols = self.cols + (self.extra or 0)
        self.rows_out = padded(rows, pad_to)
        tiles = groups_of(self.cols)
        self.launch = KERNEL.bind((t,), device, tiles * groups_of(self.rows_out), tile_threads(t), overlap=True)
        step = x_cols if self.extra is not None else step
        self.args = (rows, self.rows_out, self.cols, x_cols, step, tiles)


def _plan(x, row, column, dtype: torch.dtype, pad_to: int, align: int):
    """Return a plan, None if there is nothing to quantise, or False for what there is no kernel for, e5m2."""
    _check(x, row, column, dtype, pad_to)
    if 0 in x[1]:
        return None
    return _Plan(x, token("x", x[0], _INPUTS), pad_to, align) if dtype == torch.float8_e4m3fn else False


_PLANS = Plans(_plan)


def _launch(
    x: Tensor,
    row_factor: Tensor | None,
    column_factor: Tensor | None,
    dtype: torch.dtype,
    pow2_scale: bool,
    pad_to: int,
) -> tuple[Tensor, Tensor]:
    # Types without a kernel of their own widen exactly to one that has.
    x = x.to(_WIDER[x.dtype]) if x.dtype in _WIDER else x
    row, column = (None if f is None else f.contiguous() for f in (row_factor, column_factor))
    plan = _PLANS[metadata(x), metadata(row), metadata(column), dtype, pad_to, x.data_ptr() & 15]
    if plan is None:
        return _nothing(x, dtype, pow2_scale, pad_to)
    if plan is False:
        values = TRANSPOSE.launch(_values(x, row, column), 0, 1, pad_to)
        return quantized_rows(values, dtype, pow2_scale)
    scale = column_scales(x, row, column, dtype, pow2_scale)
    if plan.extra is not None:
        x = _widened(x, plan.extra)
    q = torch.empty((plan.cols, plan.rows_out), dtype=dtype, device=x.device)
    plan.launch(x.data_ptr(), address(row), address(column), scale.data_ptr(), q.data_ptr(), *plan.args)
    return q, scale


def _widened(x: Tensor, extra: int) -> Tensor:
    """Return a dense copy with zeros after each row."""
    return F.pad(x, (0, extra)).contiguous() if extra else x.clone(memory_format=torch.contiguous_format)


def _nothing(x: Tensor, dtype: torch.dtype, pow2_scale: bool, pad_to: int) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1], padded(row_count(x.shape), pad_to)
    scale = torch.full(shape[:1], empty_scale(pow2_scale), dtype=torch.float32, device=x.device)
    return torch.zeros(shape, dtype=torch.uint8, device=x.device).view(dtype), scale


def _values(x: Tensor, row_factor: Tensor | None, column_factor: Tensor | None) -> Tensor:
    """Return what is quantised, as a matrix of fp32."""
    z = x.float().reshape(-1, x.shape[-1])
    if column_factor is not None:
        z = z * column_factor
    return z if row_factor is None else z * row_factor[:, None]


def _reference(x, row_factor, column_factor, dtype, pow2_scale, pad_to):
    _check(metadata(x), metadata(row_factor), metadata(column_factor), dtype, pad_to)
    if x.numel() == 0:
        return _nothing(x, dtype, pow2_scale, pad_to)
    z = _values(x, row_factor, column_factor).t()
    return reference.quantize(F.pad(z, (0, -z.shape[1] % pad_to)), "row", dtype, pow2_scale, "row")


def _fake(x, row_factor, column_factor, dtype, pow2_scale, pad_to):
    rows = padded(row_count(x.shape), pad_to)
    return x.new_empty((x.shape[-1], rows), dtype=dtype), x.new_empty(x.shape[-1], dtype=torch.float32)


CHANNEL = TorchOp(
    "quantize_fp8_channel(Tensor x, Tensor? row_factor, Tensor? smooth, ScalarType dtype, bool pow2_scale, int pad_to)"
    " -> (Tensor, Tensor)",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)
