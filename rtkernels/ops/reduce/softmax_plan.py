"""The kernels of softmax, the choice between them, and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_dimensions, check_dtype, check_shape
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES, WIDTH, block_of, group_threads, row_blocks, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Step, Steps

LARGEST_SCALE = torch.finfo(torch.float32).max
# Vectors of 16 bytes in a thread that holds a part of a row, best ones first, and how many threads a row then has.
_FWD_VECTORS = {1: 32, 4: 256, 3: 256, 8: 1024}
_BWD_VECTORS = {1: 32, 4: 1024}
_CLUSTER_VECTORS, _CLUSTER_THREADS = 5, 1024  # of a thread and of a block of softmax_fwd_few_rows, at most
_FEW_ROWS_MIN, _BLOCK_MIN = 128, 512  # vectors of its rows, and of each block where a row has several, at least


def _kernels(unit: str, entry: str, args: str, per_thread: Iterable[int]) -> tuple[Kernel, Kernel]:
    """Return the kernels for rows that a block holds, with so many vectors a thread, and for all other rows."""
    args += " threads_per_row:i64 scale:f64 log:i64"
    in_registers = list(product(WIDTH, per_thread))
    return (
        Kernel(unit, entry, template="T CHUNKS", args=args, variants=in_registers, max_registers=64),
        Kernel(unit, f"{entry}_long", template="T", args=f"{args} aligned16:i64", variants=TYPES, max_registers=64),
    )


_FWD = _kernels(
    "reduce/softmax.cu", "softmax_fwd",
    "x:ptr y:ptr lengths:ptr rows:i64 cols:i64 x_stride:i64 y_stride:i64 lengths_int64:i64", _FWD_VECTORS,
)  # fmt: skip
_BWD = _kernels(
    "reduce/softmax_bwd.cu", "softmax_bwd",
    "dy:ptr y:ptr dx:ptr lengths:ptr rows:i64 cols:i64 dy_stride:i64 y_stride:i64 lengths_int64:i64", _BWD_VECTORS,
)  # fmt: skip


_FEW_ROWS = Kernel(
    "reduce/softmax.cu", "softmax_fwd_few_rows", template="T", needs=("cluster",), max_registers=64,
    args="x:ptr y:ptr lengths:ptr cols:i64 x_stride:i64 y_stride:i64 lengths_int64:i64 blocks:i64 scale:f64 log:i64",
    variants=TYPES,
)  # fmt: skip


def check(x: Meta, lengths: Meta | None, name: str = "x") -> None:
    """Raise an ArgumentError for arguments that do not fit together. The softmax is over the last dimension."""
    check_dimensions(name, x.shape)
    if lengths is not None:
        check_dtype("lengths", lengths.dtype)
        check_shape("lengths", lengths.shape, x.shape[:-1], f"the shape of {name} without dim")


def check_bwd(y: Meta, lengths: Meta | None) -> None:
    check(y, lengths, name="y")


def check_scale(scale: float) -> None:
    if not abs(scale) <= LARGEST_SCALE:
        raise ArgumentError(f"scale is {scale}; expected a finite float32 number")


def _step(
    forward: bool, tensors: tuple[str, ...], x: Meta, strides: tuple[int, int], starts: int, lengths: Meta | None,
    log: bool, device: int,
) -> Step:  # fmt: skip
    """Return the launch for the rows of `x`.

    Args:
        forward: Else backward.
        tensors: Names of those that the kernel takes.
        x: Of the input, or of y.
        strides: Distances between rows, of the two tensors whose strides the kernel takes.
        starts: 0 if every tensor's address is a multiple of 16.
        lengths: Of the valid lengths.
        log: Of the logarithm.
        device: CUDA ordinal, or -1.
    """
    in_registers, other = _FWD if forward else _BWD
    t, size, rows, cols = x.token, x.dtype.itemsize, x.rows, x.shape[-1]
    aligned16 = vector_bytes(starts, cols * size, *(stride * size for stride in strides)) == 16
    lengths_int64 = int(lengths is not None and lengths.dtype == torch.int64)
    shared_row = _row_cluster(device_info(device), rows, cols // WIDTH[t]) if forward and aligned16 else None
    if shared_row:
        blocks, threads = shared_row
        launch = _FEW_ROWS.bind((t,), device, rows * blocks, threads, cluster=blocks)
        return Step(launch, *tensors, cols, *strides, lengths_int64, blocks, "scale", int(log))
    found = _per_thread(cols // WIDTH[t], _FWD_VECTORS if forward else _BWD_VECTORS) if aligned16 else None
    shared = found[0] * block_of(found[1]) * 16 if found and forward else 0
    if found and shared <= device_info(device).shared_per_block - 1024:
        per_thread, threads = found
        kernel, variant, more = in_registers, (t, per_thread), ()
    else:
        threads = group_threads(-(-cols // (WIDTH[t] if aligned16 else 1)), 1024)
        kernel, variant, more, shared = other, (t,), (int(aligned16),), 0
    launch = kernel.bind(variant, device, *row_blocks(rows, threads), shared)
    return Step(launch, *tensors, rows, cols, *strides, lengths_int64, threads, "scale", int(log), *more)


def _row_cluster(info: DeviceInfo, rows: int, vectors: int) -> tuple[int, int] | None:
    """Return the blocks of a row of softmax_fwd_few_rows and their threads; None if other kernels are to be used."""
    if level() or "cluster" not in info.target.features or rows > info.sm_count or vectors < _FEW_ROWS_MIN:
        return None
    fit = [b for b in (1, 2, 4, 8) if vectors <= b * _CLUSTER_THREADS * _CLUSTER_VECTORS]
    if not fit:
        return None
    blocks = max((b for b in fit if rows * b <= info.sm_count and vectors >= b * _BLOCK_MIN), default=0)
    per_thread = -(-vectors // (blocks * _CLUSTER_THREADS)) if blocks else _CLUSTER_VECTORS
    if blocks > 1:
        per_thread = max(per_thread, 2)
    blocks = blocks or fit[-1]  # more blocks than SMs: small ones, several of which fit on one
    return blocks, -(-vectors // (blocks * per_thread * 32)) * 32


def _per_thread(vectors: int, limits: dict[int, int]) -> tuple[int, int] | None:
    """Return the vectors of each thread and the threads of a row, few of them idle; None if the row is too long."""
    if vectors <= limits[1]:
        return 1, group_threads(vectors, limits[1])
    choices = [
        (n, group_threads(-(-vectors // n), limit)) for n, limit in limits.items() if 1 < n and vectors <= n * limit
    ]
    return min(choices, key=lambda choice: choice[0] * choice[1], default=None)


def plan_fwd(x: Meta, lengths: Meta | None, log: bool, device: int, to: str = "y") -> Steps:
    """Return the launch that writes the result to `to`: "y", which is dense, or "x"."""
    strides = x.row_stride, x.row_stride if to == "x" else x.shape[-1]
    return Steps(_step(True, ("x", to, "lengths"), x, strides, x.misaligned, lengths, log, device))


def plan_as_torch(x: Meta, log: bool, device: int) -> Steps:
    """The same without lengths; rows that have nothing but -inf are NaN, as torch has them."""
    strides = x.row_stride, x.shape[-1]
    return Steps(_step(True, ("x", "y", 0), x, strides, x.misaligned, None, int(log) | 2, device))


def plan_bwd(dy: Meta, y: Meta, lengths: Meta | None, log: bool, device: int) -> Steps:
    strides = dy.row_stride, y.row_stride
    return Steps(_step(False, ("dy", "y", "dx", "lengths"), y, strides, misaligned(dy, y), lengths, log, device))


KERNELS = (*_FWD, *_BWD, _FEW_ROWS)
