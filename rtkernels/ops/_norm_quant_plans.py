"""How the quantised normalisations are launched: kernel records, checks, and from tensor metadata to launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels._kernel import Kernel, Plans, allocator, dense_strides
from rtkernels._layout import (
    address,
    block_of,
    check_same,
    group_threads,
    row_count,
    row_stride,
    token,
    vector_bytes,
)
from rtkernels.errors import ArgumentError

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)

LAYOUTS = ("row", "transposed", "both")
SCALE_LAYOUTS = ("row", "column")
CODES = torch.float8_e4m3fn
GROUP = 128

_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_ROW_THREADS, _ROW_CHUNKS = 512, (2, 4)
_RSTD_THREADS = 512
_CLUSTER_STATIC = 32 * 1024  # bytes, at least the kernel's static shared memory
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED

_ROW = Kernel(
    "norm/norm_quant.cu",
    "rms_norm_fp8_row",
    template="T W CHUNKS",
    args="x:ptr residual:ptr weight:ptr q:ptr scale:ptr rstd:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 "
    "residual_stride:i64 threads_per_row:i64 scale_row:i64 scale_group:i64 pow2:i64 eps:f64 offset:f64",
    variants=[(t, w, c) for t, w in _TYPES for c in _ROW_CHUNKS],
    max_registers=84,
)
_RSTD = Kernel(
    "norm/norm_quant.cu",
    "rms_norm_fp8_rstd",
    template="T VEC",
    args="x:ptr residual:ptr sum:ptr rstd:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 eps:f64",
    variants=[(t, v) for t in _WIDTH for v in (1, _WIDTH[t])],
    max_registers=60,
)
_TILE = Kernel(
    "norm/norm_quant_tile.cu",
    "rms_norm_fp8_tile",
    template="T WIDE ROWS COLUMNS",
    args="x:ptr weight:ptr rstd:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr y:ptr rows:i64 cols:i64 x_stride:i64 "
    "scale_row:i64 scale_group:i64 column_tiles:i64 weight_wide:i64 early:i64 pow2:i64 offset:f64",
    variants=[
        (t, w, *rc) for t in _WIDTH for w in (False, True) for rc in ((True, False), (False, True), (True, True))
    ],
    max_registers=128,
)
KERNELS = (_ROW, _RSTD, _TILE)


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def groups_of(size: int) -> int:
    """Return how many groups of 128 cover `size` elements."""
    return -(-size // GROUP)


def check_options(layout: str, scale_layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together."""
    for name, value, accepted in (("layout", layout, LAYOUTS), ("scale_layout", scale_layout, SCALE_LAYOUTS)):
        if value not in accepted:
            raise ArgumentError(f"{name} is {value!r}; expected one of {', '.join(map(repr, accepted))}")
    if scale_layout == "column" and layout == "transposed":
        raise ArgumentError("scale_layout 'column' is for the scales of rows; layout 'transposed' has none")


def check(
    x: Metadata,
    weight: Metadata | None,
    residual: Metadata | None,
    rstd: Metadata | None,
    layout: str,
    scale_layout: str,
    keep: bool,
) -> None:
    """Raise an ArgumentError unless these arguments go together."""
    check_options(layout, scale_layout)
    dtype, shape, _, device = x
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    if weight is not None:
        token("weight", weight[0], (dtype, torch.float32))
        if tuple(weight[1]) != (shape[-1],):
            raise ArgumentError(
                f"weight has shape {tuple(weight[1])}; expected ({shape[-1]},), the last dimension of x"
            )
        check_same("weight", weight[3], device, "device index")
    if residual is not None:
        check_same("residual", residual[0], dtype, "dtype")
        check_same("residual", residual[1], shape, "shape")
        check_same("residual", residual[3], device, "device index")
    if rstd is not None:
        if layout != "transposed" or residual is not None or keep:
            raise ArgumentError(
                "rstd is for layout 'transposed' without residual and keep: what was normalised before is quantised "
                "once more, along its columns"
            )
        token("rstd", rstd[0], (torch.float32,))
        if tuple(rstd[1]) != tuple(shape[:-1]):
            raise ArgumentError(f"rstd has shape {tuple(rstd[1])}; expected {tuple(shape[:-1])}, one per row of x")
        check_same("rstd", rstd[3], device, "device index")
    if keep and layout == "transposed":
        raise ArgumentError("keep goes with layout 'row' or 'both', not 'transposed'")


def outputs_of(
    shape: Sequence[int], dtype: torch.dtype, layout: str, scale_layout: str, rstd: bool, keep: bool, residual: bool
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return name, shape and dtype of every result of a call, in order. `rstd`: it is computed, not given."""
    shape, rows, cols = tuple(shape), row_count(shape), shape[-1]
    found: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    if layout != "transposed":
        groups = groups_of(cols)
        scales = (groups, rows) if scale_layout == "column" else (*shape[:-1], groups)
        found += [("q", shape, CODES), ("scale", scales, torch.float32)]
    if layout != "row":
        found += [("q_t", (cols, rows), CODES), ("scale_t", (groups_of(rows), cols), torch.float32)]
    if rstd:
        found.append(("rstd", shape[:-1], torch.float32))
    if keep:
        found.append(("y", shape, dtype))
    if residual:
        found.append(("sum", shape, dtype))
    return found


# ---- plans ----------------------------------------------------------------------------------------------------------

_SLOTS = ("q", "scale", "q_t", "scale_t", "rstd", "y", "sum")


class _Plan:
    """Allocations and the one or two launches of a call."""

    def __init__(
        self,
        x: Metadata,
        weight: Metadata | None,
        residual: Metadata | None,
        rstd: Metadata | None,
        layout: str,
        pow2: bool,
        scale_layout: str,
        keep: bool,
        align: int,
    ) -> None:
        dtype, shape, stride, device = x
        t, size = token("x", dtype), dtype.itemsize
        rows, cols = row_count(shape), shape[-1]
        x_stride = row_stride(shape, stride)
        residual_stride = 0 if residual is None else row_stride(*residual[1:3])
        wanted = outputs_of(shape, dtype, layout, scale_layout, rstd is None, keep, residual is not None)
        self._allocate = allocator(device)
        self._outputs = [(_SLOTS.index(name), (s, dense_strides(s), d)) for name, s, d in wanted]
        wide = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) == 16
        groups = groups_of(cols)
        scale_strides = (1, rows) if scale_layout == "column" else (groups, 1)
        vec = _WIDTH[t] if wide else 1
        vectors = -(-cols // vec)
        w = t if weight is None else token("weight", weight[0])
        self._row = self._rstd = None
        if layout == "row" and wide and vectors <= _ROW_THREADS * max(_ROW_CHUNKS):
            lanes = GROUP // vec
            chunks = 2 if vectors <= 128 else 4
            threads = max(group_threads(-(-vectors // chunks), _ROW_THREADS), lanes)
            block = block_of(threads)
            self._row = _ROW.bind((t, w, chunks), device, -(-rows // (block // threads)), block)
            self._args = (rows, cols, x_stride, residual_stride, threads, *scale_strides, pow2)
            return
        if rstd is None:
            threads = group_threads(-(-vectors // 4), _RSTD_THREADS)
            block = block_of(threads)
            self._rstd = _RSTD.bind((t, vec), device, -(-rows // (block // threads)), block)
            self._rstd_args = (rows, cols, x_stride, residual_stride, threads)
        tiles = groups * groups_of(rows)
        variant = (t, wide, layout != "transposed", layout != "row")
        self._tile = _TILE.bind(variant, device, tiles, GROUP // _WIDTH[t] * 16, overlap=rstd is None)
        if residual is not None:
            x_stride = cols  # the sum is read instead
        self._args = (rows, cols, x_stride, *scale_strides, groups, w != t, residual is None, pow2)

    def run(
        self,
        x: Tensor,
        weight: Tensor | None,
        residual: Tensor | None,
        rstd: Tensor | None,
        eps: float,
        offset: float,
    ) -> list[Tensor]:
        allocate, results, at = self._allocate, [], [0] * len(_SLOTS)
        for slot, layout in self._outputs:
            made = allocate(*layout)
            results.append(made)
            at[slot] = made.data_ptr()
        q, scale, q_t, scale_t, made_rstd, y, total = at
        inputs = (x.data_ptr(), address(residual))
        if self._row is not None:
            self._row(*inputs, address(weight), q, scale, made_rstd, y, total, *self._args, eps, offset)
            return results
        if self._rstd is not None:
            self._rstd(*inputs, total, made_rstd, *self._rstd_args, eps)
        self._tile(
            total or inputs[0], address(weight), made_rstd or address(rstd), q, scale, q_t, scale_t, y, *self._args,
            offset,
        )  # fmt: skip
        return results


def _is_dense(t: Metadata | None) -> bool:
    """Return True if a tensor that is not empty is contiguous as torch sees it: strides of size 1 do not count."""
    step = 1
    for size, stride in reversed(list(zip(*t[1:3], strict=True)) if t else ()):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _plan(x, weight, residual, rstd, layout: str, pow2: bool, scale_layout: str, keep: bool, align: int):
    """Return what to run: a plan; None if an input must be copied first; False if there is nothing to launch."""
    check(x, weight, residual, rstd, layout, scale_layout, keep)
    if 0 in x[1]:
        return False
    rowed = row_stride(*x[1:3]) is not None and (residual is None or row_stride(*residual[1:3]) is not None)
    if not (rowed and _is_dense(weight) and _is_dense(rstd)):
        return None
    return _Plan(x, weight, residual, rstd, layout, pow2, scale_layout, keep, align)


PLANS = Plans(_plan)
