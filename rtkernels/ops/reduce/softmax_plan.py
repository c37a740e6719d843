"""The kernels of softmax, and which one runs how for which tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    block_of,
    check_same,
    group_threads,
    is_dense,
    row_count,
    row_stride,
    token,
    vector_bytes,
)

_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
LARGEST_SCALE = torch.finfo(torch.float32).max
# Pieces of 16 bytes in a thread that holds a part of a row, best ones first, and the most threads a row then has.
_FWD_PIECES = {1: 32, 4: 256, 3: 256, 8: 1024}
_BWD_PIECES = {1: 32, 2: 512, 4: 1024}


def _kernels(unit: str, entry: str, args: str, pieces: Iterable[int]) -> tuple[Kernel, Kernel]:
    """Return the kernels for rows that a block holds, with so many pieces a thread, and for all other rows."""
    args += " threads_per_row:i64 scale:f64 log:i64"
    held, other = list(product(_WIDTH, pieces)), [(t,) for t in _WIDTH]
    return (
        Kernel(unit, entry, template="T CHUNKS", args=args, variants=held, max_registers=64),
        Kernel(unit, f"{entry}_long", template="T", args=f"{args} aligned16:i64", variants=other, max_registers=64),
    )


_FWD = _kernels(
    "reduce/softmax.cu",
    "softmax_fwd",
    "x:ptr y:ptr lengths:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 wide:i64",
    _FWD_PIECES,
)
_BWD = _kernels(
    "reduce/softmax_bwd.cu",
    "softmax_bwd",
    "dy:ptr y:ptr dx:ptr lengths:ptr rows:i64 cols:i64 dy_stride:i64 y_stride:i64 wide:i64",
    _BWD_PIECES,
)

# ---- validation and planning: plain metadata in, a bound launch out -------------------------------------------------

Meta = tuple[Any, ...]


def check(x: Meta, lengths: Meta | None, name: str = "x") -> None:
    """Raise an ArgumentError for arguments that do not fit together. The softmax is over the last dimension."""
    dtype, shape, _, device = x
    token(name, dtype)
    if not shape:
        raise ArgumentError(f"{name} has no dimensions; expected at least one")
    if lengths is not None:
        if lengths[0] not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"lengths has dtype {str(lengths[0]).removeprefix('torch.')}; expected one of int32, int64"
            )
        if tuple(lengths[1]) != tuple(shape[:-1]):
            raise ArgumentError(
                f"lengths has shape {tuple(lengths[1])}; expected {tuple(shape[:-1])}, the shape of {name} without dim"
            )
        check_same("lengths", lengths[3], device, "device index", of=name)


def check_scale(scale: float) -> None:
    if not abs(scale) <= LARGEST_SCALE:
        raise ArgumentError(f"scale is {scale}; expected a finite float32 number")


def _bind(forward: bool, t: str, rows: int, cols: int, device: int, full: bool, log: bool):
    """Return the launch for rows of `cols` columns, and the integers that go before and after scale.

    Args:
        forward: Else backward.
        t: Token of the dtype.
        rows: At least 1.
        cols: At least 1.
        device: CUDA ordinal, or -1.
        full: All rows can be accessed in pieces of 16 bytes.
        log: Of the logarithm.
    """
    held, other = _FWD if forward else _BWD
    vectors = cols // _WIDTH[t]
    found = _holding(vectors, _FWD_PIECES if forward else _BWD_PIECES) if full else None
    if found:
        pieces, threads = found
        block = block_of(threads)
        grid = min(-(-rows // (block // threads)), GRID_LIMIT)
        if not forward:  # in registers
            return held.bind((t, pieces), device, grid, block), (threads,), (int(log),)
        shared = pieces * block * 16
        if shared <= device_info(device).shared_per_block - 1024:
            return held.bind((t, pieces), device, grid, block, shared), (threads,), (int(log),)
    vec = _WIDTH[t] if full else 1
    threads = group_threads(-(-cols // vec), 1024)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), GRID_LIMIT)
    return other.bind((t,), device, grid, block), (threads,), (int(log), int(full))


def _holding(vectors: int, most: dict[int, int]) -> tuple[int, int] | None:
    """Return the pieces of each thread and the threads of a row, few of them idle; None if the row is too long."""
    if vectors <= most[1]:
        return 1, group_threads(vectors, most[1])
    choices = [(p, group_threads(-(-vectors // p), m)) for p, m in most.items() if 1 < p and vectors <= p * m]
    return min(choices, key=lambda choice: choice[0] * choice[1], default=None)


def _plan_fwd(x: Meta, lengths: Meta | None, align: int, log: bool, in_place: bool):
    """Return ``(launch, integers, integers, allocator and layout of y)``; None if an input must be copied first."""
    check(x, lengths)
    dtype, shape, stride, device = x
    rows, cols = row_count(shape), shape[-1]
    memory = dense_memory(device, shape, dtype)
    if rows == 0 or cols == 0:
        return None, (), (), *memory
    x_stride = row_stride(shape, stride)
    if in_place and x_stride is not None and rows > 1 and abs(x_stride) < cols:
        raise ArgumentError("x has overlapping rows; in_place needs memory of its own for every element")
    if x_stride is None or not is_dense(lengths):
        return None
    t, size = token("x", dtype), dtype.itemsize
    full = vector_bytes(align, cols * size, x_stride * size) == 16
    launch, before, after = _bind(True, t, rows, cols, device, full, log)
    wide = int(lengths is not None and lengths[0] == torch.int64)
    return launch, (rows, cols, x_stride, x_stride if in_place else cols, wide, *before), after, *memory


FWD_PLANS = Plans(_plan_fwd)


def _plan_bwd(dy: Meta, y: Meta, lengths: Meta | None, align: int, log: bool):
    """Return ``(launch, integers, integers)``."""
    dtype, shape, _, device = y
    rows, cols, size = row_count(shape), shape[-1], dtype.itemsize
    strides = [row_stride(m[1], m[2]) for m in (dy, y)]
    full = vector_bytes(align, cols * size, *(s * size for s in strides)) == 16
    t = token("y", dtype)
    launch, before, after = _bind(False, t, rows, cols, device, full, log)
    wide = int(lengths is not None and lengths[0] == torch.int64)
    return launch, (rows, cols, *strides, wide, *before), after


BWD_PLANS = Plans(_plan_bwd)


KERNELS = (*_FWD, *_BWD)
