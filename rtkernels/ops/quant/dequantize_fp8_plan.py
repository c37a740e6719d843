"""Launch planning of ``dequantize_fp8``."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant.quantize_fp8_kernels import (
    BACK,
    BACK_GENERIC,
    BACK_T,
    GENERIC_THREADS,
    GENERIC_TYPES,
    GROUP,
    WIDTH,
)
from rtkernels.ops.quant.quantize_fp8_plan import (
    FP8_DTYPES,
    Matrix,
    Metadata,
    check_options,
    check_static_scale,
    groups_of,
    scale_shape,
)
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import FLOAT_DTYPES, check_same, is_dense, row_stride, token
from rtkernels.runtime.operator.plan import DensePlan

_TRANSPOSED_THREADS = 128


def check_dequantize(
    q: Metadata, scale: Metadata, granularity: str, code: torch.dtype, dtype: torch.dtype, layout: str
) -> None:
    """Raise an ArgumentError unless q and scale belong together."""
    check_options(granularity, layout)
    token("q", code, FP8_DTYPES)
    if q[0] not in (code, torch.uint8):
        raise ArgumentError(f"q has dtype {q[0]}; expected {code}, as code_dtype says, or uint8".replace("torch.", ""))
    token("the result", dtype, FLOAT_DTYPES)
    shape = tuple(q[1])
    if not shape:
        raise ArgumentError("q has no dimensions; expected at least one")
    if granularity == "tensor":
        return check_static_scale(scale, q[3])
    if granularity == "group_t":
        if len(shape) != 2:
            raise ArgumentError(f"q has shape {shape}; granularity 'group_t' expects two dimensions, [columns, rows]")
        shape = shape[::-1]
    token("scale", scale[0], (torch.float32,))
    wanted = scale_shape(shape, granularity, layout)
    if tuple(scale[1]) != wanted:
        raise ArgumentError(
            f"scale has shape {tuple(scale[1])}; expected {wanted} for granularity {granularity!r}, "
            f"scale_layout {layout!r} and q of shape {tuple(q[1])}"
        )
    check_same("scale", scale[3], q[3], "device index", of="q")


def _transposed_tiles(cols: int, t: str) -> int:
    return -(-cols // (_TRANSPOSED_THREADS // 32 * 4 * WIDTH[t]))


class _DequantizePlan(DensePlan):
    __slots__ = ()

    def run(self, q: int, scale: int) -> Tensor:
        y = self.allocate(*self.layout)
        if self.launch is not None:
            self.launch(q, scale, y.data_ptr())
        return y


def _plan_dequantize(
    q: Metadata, scale: Metadata, granularity: str, code: torch.dtype, dtype: torch.dtype, layout: str, align: int
):
    check_dequantize(q, scale, granularity, code, dtype, layout)
    t, f, shape = token("the result", dtype), token("q", code, FP8_DTYPES), q[1]
    memory = dense_memory(q[3], shape[::-1] if granularity == "group_t" else shape, dtype)
    if 0 in shape:
        return _DequantizePlan(None, *memory)
    if row_stride(shape, q[2]) is None or not is_dense(scale):
        return None
    groups = groups_of(shape[-1])
    if granularity == "group_t":
        m = Matrix(q, align, 16, flat=False)
        rows, cols = m.cols, m.rows
        tiles = _transposed_tiles(cols, t)
        ending = (rows, cols, m.stride, tiles, m.vec > 1, cols % WIDTH[t] == 0)
        launch = BACK_T.bind((t, f), m.device, tiles * groups_of(rows), _TRANSPOSED_THREADS, ending=ending)
        return _DequantizePlan(launch, *memory)
    flat = granularity == "tensor" or (granularity == "group" and layout == "row" and shape[-1] % GROUP == 0)
    m = Matrix(q, align, WIDTH[t], flat=flat)
    shift, scale_row, scale_column = {
        "tensor": (0, 0, 0),
        "row": (0, 1, 0),
        "group": (0, 1, m.rows) if layout == "column" else (0, groups, 1),
        "block": (7, groups, 1),
    }[granularity]
    cut = m.runs(2, threads=128)
    ending = (m.rows, m.cols, m.stride, cut.threads_per_row, cut.runs_per_row, shift, scale_row, scale_column)
    if m.vec == 1:
        ending += GENERIC_TYPES[t], f == "e5m2"
        launch = BACK_GENERIC.bind((GENERIC_THREADS,), m.device, cut.grid, cut.block, ending=ending)
        return _DequantizePlan(launch, *memory)
    return _DequantizePlan(BACK.bind((t, f, m.vec), m.device, cut.grid, cut.block, ending=ending), *memory)


DEQUANTIZE_PLANS = Plans(_plan_dequantize)
