"""The kernels of the divergences, and which one runs how for which tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    DTYPE_TOKEN,
    GRID_LIMIT,
    block_of,
    check_same,
    group_threads,
    metadata,
    row_count,
    row_stride,
    token,
    vector_bytes,
)

# What the operators compute; the kernels know the first three. REVERSE is LOGARITHM with x and target exchanged.
PROBABILITY, LOGARITHM, MIXED, REVERSE = range(4)
# What the sum is divided by: nothing, the rows that count, the size of the first dimension, the elements that count.
BY_NOTHING, BY_ROWS, BY_FIRST, BY_ELEMENTS = range(4)

_UNIT = "loss/divergence.cu"
_VARIANTS = [(2, 8), (4, 4), (4, 1)]
_THREADS, _TOTAL_THREADS = 256, 1024
_AHEAD = 2  # pieces of each input in flight in a thread

_FWD = Kernel(
    _UNIT,
    "divergence_fwd",
    template="BYTES VEC",
    args="x:ptr target:ptr labels:ptr row_loss:ptr each:ptr out:ptr total:ptr rows:i64 cols:i64 x_stride:i64 "
    "target_stride:i64 wide:i64 ignore:i64 threads_per_row:i64 half:i64 mode:i64 in_target:i64 beta:f64 scale:f64",
    variants=_VARIANTS,
    max_registers=84,
)
_TOTAL = Kernel(
    _UNIT,
    "divergence_total",
    template="THREADS",
    args="row_loss:ptr labels:ptr total:ptr rows:i64 wide:i64 ignore:i64 divide:i64 factor:f64",
    variants=[(_TOTAL_THREADS,)],
    max_registers=48,
)
_BWD = Kernel(
    _UNIT,
    "divergence_bwd",
    template="BYTES VEC",
    args="x:ptr target:ptr labels:ptr grad:ptr total:ptr each:ptr out:ptr rows:i64 cols:i64 x_stride:i64 "
    "target_stride:i64 each_stride:i64 wide:i64 ignore:i64 threads_per_row:i64 half:i64 mode:i64 in_target:i64 "
    "beta:f64",
    variants=_VARIANTS,
    max_registers=84,
)
KERNELS = (_FWD, _TOTAL, _BWD)

Meta = tuple[Any, ...]


def resolve(shape: Sequence[int], over: int, factor: float) -> tuple[float, bool]:
    """Return what the sum is multiplied with, and whether it is also divided by the rows that count.

    Operators ask this, and not the functions around them: compiled code must not depend on the number of rows.
    """
    if over == BY_FIRST:
        return factor / max(shape[0], 1), False
    return factor / max(shape[-1], 1) if over == BY_ELEMENTS else factor, over != BY_NOTHING


def check(x: Meta, target: Meta, labels: Meta | None) -> None:
    """Raise an ArgumentError for arguments that do not fit together."""
    token("input", x[0])
    if not x[1]:
        raise ArgumentError("input has no dimensions; expected at least one, the classes")
    for index, what in ((0, "dtype"), (1, "shape"), (3, "device index")):
        check_same("target", target[index], x[index], what, of="input")
    if labels is not None:
        if labels[0] not in (torch.int32, torch.int64):
            kind = str(labels[0]).removeprefix("torch.")
            raise ArgumentError(f"labels has dtype {kind}; expected one of int32, int64")
        if tuple(labels[1]) != tuple(x[1][:-1]):
            raise ArgumentError(
                f"labels has shape {tuple(labels[1])}; expected {tuple(x[1][:-1])}, that of input without its last one"
            )
        check_same("labels", labels[3], x[3], "device index", of="input")


def check_bwd(
    grad: Tensor, x: Tensor, target: Tensor, labels: Tensor | None, total: Tensor | None, mode: int, in_target: bool
) -> None:
    """Raise an ArgumentError for arguments of the gradient that do not fit together."""
    check(metadata(x), metadata(target), metadata(labels))
    if in_target and mode == PROBABILITY:
        raise ArgumentError("target requires grad; expected none, or log_target=True")
    if total is None:
        check_same("grad", grad.dtype, x.dtype, "dtype", of="input")
        check_same("grad", grad.shape, x.shape, "shape", of="input")
    elif grad.dtype != torch.float32 or grad.numel() != 1:
        kind = str(grad.dtype).removeprefix("torch.")
        raise ArgumentError(f"grad has dtype {kind} and {grad.numel()} elements; expected one float32 number")


def _shape_of_work(tensors: tuple[Meta, ...], align: int):
    """Return ``(variant, rows, cols, row strides, grid, block, threads per row)``; None if it must be dense fp32."""
    dtype, shape = tensors[0][:2]
    rows, cols, size = row_count(shape), shape[-1], dtype.itemsize
    strides = [row_stride(t[1], t[2]) for t in tensors]
    full = vector_bytes(align, cols * size, *(s * size for s in strides)) == 16
    if not full and size == 2:
        return None
    vec = 16 // size if full else 1
    threads = group_threads(-(-cols // (vec * _AHEAD)), _THREADS)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), GRID_LIMIT)
    return (size, vec), rows, cols, strides, grid, block, threads


def _is_half(meta: Meta) -> int:
    return int(DTYPE_TOKEN[meta[0]] == "fp16")


def _plan_fwd(x: Meta, target: Meta, align: int, wide: bool):
    """Return ``(launch, integers up to wide, integers after ignore)``; None if inputs must become fp32."""
    work = _shape_of_work((x, target), align)
    if work is None:
        return None
    variant, rows, cols, strides, grid, block, threads = work
    launch = _FWD.bind(variant, x[3], grid, block)
    return launch, (rows, cols, *strides, int(wide)), (threads, _is_half(x))


def _plan_total(device: int):
    return _TOTAL.bind((_TOTAL_THREADS,), device, 1, _TOTAL_THREADS, overlap=True)


def _plan_bwd(x: Meta, target: Meta, each: Meta | None, align: int, wide: bool):
    """As `_plan_fwd`, with the incoming gradient of every element."""
    work = _shape_of_work((x, target) if each is None else (x, target, each), align)
    if work is None:
        return None
    variant, rows, cols, strides, grid, block, threads = work
    launch = _BWD.bind(variant, x[3], grid, block)
    strides = (*strides, 0) if each is None else strides
    return launch, (rows, cols, *strides, int(wide)), (threads, _is_half(x))


FWD_PLANS, TOTAL_PLANS, BWD_PLANS = Plans(_plan_fwd), Plans(_plan_total), Plans(_plan_bwd)
