"""fp8 with one scale per column and transposed codes: the operator behind granularity "channel"."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.layout.transpose import TRANSPOSE
from rtkernels.ops.layout.transpose_plan import padded
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.column_absmax import check_factor, column_steps
from rtkernels.ops.quant.quantize_fp8_operators import QUANTIZE
from rtkernels.ops.quant.quantize_fp8_plan import tile_threads
from rtkernels.ops.shared.fp8_layout import E4M3, FP8_DTYPES, groups_of
from rtkernels.runtime.checks import check_dimensions, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, row_count, vector_bytes
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps

KERNEL = Kernel(
    "quant/channel.cu", "quantize_fp8_channel", template="T", max_registers=128,
    args="x:ptr row_factor:ptr column_factor:ptr scale:ptr q_t:ptr rows:i64 rows_out:i64 cols:i64 x_cols:i64 "
    "x_stride:i64 tiles_across:i64",
    variants=[("bf16",), ("fp32",)],
)  # fmt: skip
_INPUTS = (*FLOAT_DTYPES, torch.float8_e4m3fn)
_WIDER = {torch.float16: torch.float32, torch.float8_e4m3fn: torch.bfloat16}


def _check(x: Meta, row_factor: Meta | None, smooth: Meta | None, dtype: torch.dtype, pad_to: int) -> None:
    token("x", x.dtype, _INPUTS)
    token("the result", dtype, FP8_DTYPES)
    check_dimensions("x", x.shape)
    if not 1 <= pad_to <= 65536:
        raise ArgumentError(f"pad_to is {pad_to}; expected 1 to 65536")
    check_factor("row_factor", row_factor, x.rows, "row")
    check_factor("smooth", smooth, x.shape[-1], "column")


def whole_rows(x: Meta, dtype: torch.dtype) -> tuple[Meta, int, dict[str, Any] | None]:
    """Return x as kernels take it that read rows of whole 16 bytes: its meta, its columns, and how it is converted.

    Types without a kernel of their own widen exactly to `dtype`, which has one. Columns that are added hold zeros.
    """
    cols, stride = x.shape[-1], x.row_stride
    size = dtype.itemsize
    if x.dtype == dtype and stride is not None:
        if vector_bytes(x.misaligned, cols * size, stride * size) == 16:
            return x, cols, None
    x_cols = padded(cols, 16 // size)
    meta = Meta(dtype, (x.rows, cols), (x_cols, 1), x.device, 0)
    return meta, x_cols, {"x": partial(_with_zeros, dtype=dtype, extra=x_cols - cols)}


def _with_zeros(x: Tensor, dtype: torch.dtype, extra: int) -> Tensor:
    """Return a dense copy with zeros after each row."""
    x = x.to(dtype)
    return F.pad(x, (0, extra)).contiguous() if extra else x.clone(memory_format=torch.contiguous_format)


def _plan(x: Meta, dtype: torch.dtype, pow2_scale: bool, pad_to: int, device: int) -> Steps:
    if dtype != E4M3:
        return Steps(instead=_transposed_and_quantized)
    meta, x_cols, converted = whole_rows(x, _WIDER.get(x.dtype, x.dtype))
    t, rows, cols = DTYPE_TOKEN[meta.dtype], x.rows, x.shape[-1]
    rows_out, tiles = padded(rows, pad_to), groups_of(cols)
    steps, scratch = column_steps(meta, device, ("x", "row_factor", "smooth", "scale"), dtype, pow2_scale)
    launch = KERNEL.bind((t,), device, tiles * groups_of(rows_out), tile_threads(t), overlap=True)
    sizes = rows, rows_out, cols, x_cols, meta.row_stride, tiles
    codes = Step(launch, "x", "row_factor", "smooth", "scale", "q", *sizes)
    return Steps(*steps, codes, scratch=scratch, converted=converted)


def _transposed_and_quantized(
    x: Tensor, row_factor: Tensor | None, smooth: Tensor | None, dtype: torch.dtype, pow2_scale: bool, pad_to: int
) -> tuple[Tensor, Tensor]:
    values = TRANSPOSE.launch(_values(x, row_factor, smooth), 0, 1, pad_to)
    return QUANTIZE.launch(values, "row", dtype, pow2_scale, "row")


def _values(x: Tensor, row_factor: Tensor | None, column_factor: Tensor | None) -> Tensor:
    """Return what is quantised, as a matrix of fp32."""
    z = x.float().reshape(row_count(x.shape), x.shape[-1])
    if column_factor is not None:
        z = z * column_factor
    return z if row_factor is None else z * row_factor[:, None]


def _reference(x, row_factor, smooth, dtype, pow2_scale, pad_to):
    z = _values(x, row_factor, smooth).t()
    return reference.quantize(F.pad(z, (0, -z.shape[1] % pad_to)), "row", dtype, pow2_scale, "row")


def _outputs(x, dtype, pad_to):
    return Memory((x.shape[-1], padded(row_count(x.shape), pad_to)), dtype), Memory(x.shape[-1:], torch.float32)


CHANNEL = Operator(
    "quantize_fp8_channel",
    (Argument("x", None), Dense("row_factor", None, optional=True), Dense("smooth", None, optional=True)),
    options="ScalarType dtype, bool pow2_scale, int pad_to", results="q scale", outputs=_outputs, plan=_plan,
    reference=_reference, check=_check,
)  # fmt: skip
