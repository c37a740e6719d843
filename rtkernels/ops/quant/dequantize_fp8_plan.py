"""Launch planning of ``dequantize_fp8``."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant.quantize_fp8_kernels import BACK, BACK_GENERIC, BACK_T, GENERIC_THREADS, GENERIC_TYPES, WIDTH
from rtkernels.ops.quant.quantize_fp8_plan import Matrix, check_options, check_static_scale, scale_shape
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES, GROUP, groups_of
from rtkernels.runtime.checks import check_dimensions, token
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_TRANSPOSED_THREADS = 128


def check_dequantize(
    q: Meta, scale: Meta, granularity: str, code_dtype: torch.dtype, dtype: torch.dtype, scale_layout: str
) -> None:
    """Raise an ArgumentError unless q and scale belong together."""
    check_options(granularity, scale_layout)
    token("q", code_dtype, FP8_DTYPES)
    if q.dtype not in (code_dtype, torch.uint8):
        what = f"q has dtype {q.dtype}; expected {code_dtype}, as code_dtype says, or uint8"
        raise ArgumentError(what.replace("torch.", ""))
    token("the result", dtype, FLOAT_DTYPES)
    shape = tuple(q.shape)
    check_dimensions("q", shape)
    if granularity == "tensor":
        return check_static_scale(scale)
    if granularity == "group_t":
        if len(shape) != 2:
            raise ArgumentError(f"q has shape {shape}; granularity 'group_t' expects two dimensions, [columns, rows]")
        shape = shape[::-1]
    token("scale", scale.dtype, (torch.float32,))
    wanted = scale_shape(shape, granularity, scale_layout)
    what = f"for granularity {granularity!r}, scale_layout {scale_layout!r} and q of shape {tuple(q.shape)}"
    if tuple(scale.shape) != wanted:
        raise ArgumentError(f"scale has shape {tuple(scale.shape)}; expected {wanted} {what}")


def outputs(q, granularity, dtype, scale_layout):
    check_options(granularity, scale_layout)
    return (Memory(q.shape[::-1] if granularity == "group_t" else q.shape, dtype),)


def plan(
    q: Meta, granularity: str, code_dtype: torch.dtype, dtype: torch.dtype, scale_layout: str, device: int
) -> Steps:
    t, f, cols = DTYPE_TOKEN[dtype], DTYPE_TOKEN[code_dtype], q.shape[-1]
    groups = groups_of(cols)
    if granularity == "group_t":
        m = Matrix(q, 16, flat=False)
        tiles = -(-m.rows // (_TRANSPOSED_THREADS // 32 * 4 * WIDTH[t]))
        launch = BACK_T.bind((t, f), device, tiles * groups_of(m.cols), _TRANSPOSED_THREADS)
        sizes = m.cols, m.rows, m.stride, tiles, m.vec > 1, m.rows % WIDTH[t] == 0
        return Steps(Step(launch, "q", "scale", "y", *sizes))
    flat = granularity == "tensor" or (granularity == "group" and scale_layout == "row" and cols % GROUP == 0)
    m = Matrix(q, WIDTH[t], flat=flat)
    strides = {  # rows of a scale as bits, from scale to scale down and across
        "tensor": (0, 0, 0),
        "row": (0, 1, 0),
        "group": (0, 1, m.rows) if scale_layout == "column" else (0, groups, 1),
        "block": (7, groups, 1),
    }[granularity]
    cut = m.row_slices(2, threads=128)
    sizes = m.rows, m.cols, m.stride, cut.threads_per_row, cut.slices_per_row, *strides
    if m.vec == 1:
        launch = BACK_GENERIC.bind((GENERIC_THREADS,), device, cut.grid, cut.block)
        return Steps(Step(launch, "q", "scale", "y", *sizes, GENERIC_TYPES[t], f == "e5m2"))
    return Steps(Step(BACK.bind((t, f, m.vec), device, cut.grid, cut.block), "q", "scale", "y", *sizes))
