"""The kernels of the divergences, the choice between them, and their launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_dtype, check_same, check_shape, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import group_threads, row_blocks, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Step

# What the operators compute; the kernels know the first three. REVERSE is LOGARITHM with x and target exchanged.
PROBABILITY, LOGARITHM, MIXED, REVERSE = range(4)
# What the sum is divided by: nothing, the rows that count, the size of the first dimension, the elements that count.
BY_NOTHING, BY_ROWS, BY_FIRST, BY_ELEMENTS = range(4)

_UNIT = "loss/divergence.cu"
_VARIANTS = [(2, 8), (4, 4), (4, 1)]
_THREADS = 256
_TOTAL_THREADS = 1024
_LOADS_IN_FLIGHT = 2  # vectors of each input in a thread

_FWD = Kernel(
    _UNIT, "divergence_fwd", template="BYTES VEC", max_registers=84,
    args="x:ptr target:ptr labels:ptr row_loss:ptr each:ptr out:ptr total:ptr rows:i64 cols:i64 x_stride:i64 "
    "target_stride:i64 labels_int64:i64 ignore:i64 threads_per_row:i64 half:i64 mode:i64 in_target:i64 beta:f64 "
    "scale:f64",
    variants=_VARIANTS,
)  # fmt: skip
_TOTAL = Kernel(
    _UNIT, "divergence_total", template="THREADS", max_registers=48,
    args="row_loss:ptr labels:ptr total:ptr rows:i64 labels_int64:i64 ignore:i64 divide:i64 factor:f64",
    variants=[(_TOTAL_THREADS,)],
)  # fmt: skip
_BWD = Kernel(
    _UNIT, "divergence_bwd", template="BYTES VEC", max_registers=84,
    args="x:ptr target:ptr labels:ptr grad:ptr total:ptr each:ptr out:ptr rows:i64 cols:i64 x_stride:i64 "
    "target_stride:i64 each_stride:i64 labels_int64:i64 ignore:i64 threads_per_row:i64 half:i64 mode:i64 in_target:i64 "
    "beta:f64",
    variants=_VARIANTS,
)  # fmt: skip
KERNELS = (_FWD, _TOTAL, _BWD)


def resolve(shape: Sequence[int], over: int, factor: float) -> tuple[float, bool]:
    """Return what the sum is multiplied with, and whether it is also divided by the rows that count.

    Operators ask this, and not the functions around them: compiled code must not depend on the number of rows.
    """
    if over == BY_FIRST:
        return factor / max(shape[0], 1), False
    return factor / max(shape[-1], 1) if over == BY_ELEMENTS else factor, over != BY_NOTHING


def check(x: Meta, target: Meta, labels: Meta | None) -> None:
    """Raise an ArgumentError for arguments that do not fit together."""
    token("input", x.dtype)
    if not x.shape:
        raise ArgumentError("input has no dimensions; expected at least one, the classes")
    for name, what in (("dtype", "dtype"), ("shape", "shape"), ("device", "device index")):
        check_same("target", getattr(target, name), getattr(x, name), what, of="input")
    if labels is not None:
        check_dtype("labels", labels.dtype)
        check_shape("labels", labels.shape, x.shape[:-1], "that of input without its last one")


def check_bwd(
    grad: Meta, x: Meta, target: Meta, labels: Meta | None, total: Meta | None, mode: int, in_target: bool
) -> None:
    """Raise an ArgumentError for arguments of the gradient that do not fit together."""
    check(x, target, labels)
    if in_target and mode == PROBABILITY:
        raise ArgumentError("target requires grad; expected none, or log_target=True")
    if total is None:
        check_same("grad", grad.dtype, x.dtype, "dtype", of="input")
        check_same("grad", grad.shape, x.shape, "shape", of="input")
    elif grad.dtype != torch.float32 or grad.numel() != 1:
        kind = str(grad.dtype).removeprefix("torch.")
        raise ArgumentError(f"grad has dtype {kind} and {grad.numel()} elements; expected one float32 number")


def _work(*tensors: Meta) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, int], tuple[int, int]] | None:
    """Return variant, sizes and strides, grid and block, threads per row and type; None if it must be dense fp32."""
    x = tensors[0]
    rows, cols, size = x.rows, x.shape[-1], x.dtype.itemsize
    strides = [t.row_stride for t in tensors]
    aligned16 = vector_bytes(misaligned(*tensors), cols * size, *(s * size for s in strides)) == 16
    if not aligned16 and size == 2:
        return None
    vec = 16 // size if aligned16 else 1
    threads = group_threads(-(-cols // (vec * _LOADS_IN_FLIGHT)), _THREADS)
    grid, block = row_blocks(rows, threads)
    return (size, vec), (rows, cols, *strides), (grid, block), (threads, int(x.dtype == torch.float16))


def labels_int64(labels: Meta | None) -> int:
    return int(labels is not None and labels.dtype == torch.int64)


def terms_step(
    x: Meta, target: Meta, labels: Meta | None, ignore: int, mode: int, beta: float, device: int,
    results: tuple[str | int, ...], scale: float = 1.0,
) -> Step | None:  # fmt: skip
    """Return the launch for the terms and their gradient in x; None if both must become fp32.

    Args:
        x: Logarithms of probabilities.
        target: The same, or probabilities.
        labels: Of the rows, or None.
        ignore: The label of rows that do not count.
        mode: PROBABILITY to REVERSE.
        beta: Of MIXED.
        device: CUDA ordinal, or -1.
        results: Names of the sums of rows, of the terms, of the gradient, and of a factor of the gradient.
        scale: Factor of the gradient.
    """
    names, in_target = ("x", "target"), mode == REVERSE  # what the kernel calls the target
    if in_target:
        x, target, mode, names = target, x, LOGARITHM, names[::-1]
    work = _work(x, target)
    if work is None:
        return None
    variant, sizes, grid, how = work
    launch = _FWD.bind(variant, device, *grid)
    numbers = *sizes, labels_int64(labels), ignore, *how, mode, int(in_target), beta, scale
    return Step(launch, *names, "labels", *results, *numbers)


def total_step(
    x: Meta, labels: Meta | None, ignore: int, divide: bool, factor: float, device: int, row_loss: str | int, total: str
) -> Step:
    """Return the launch for the reduced loss and its factor from the sums of the rows; only the factor without them."""
    launch = _TOTAL.bind((_TOTAL_THREADS,), device, 1, _TOTAL_THREADS, overlap=True)
    numbers = x.rows, labels_int64(labels), ignore, int(divide), factor
    return Step(launch, row_loss, "labels", total, *numbers)


def gradient_step(
    grad: Meta, x: Meta, target: Meta, labels: Meta | None, total: Meta | None, ignore: int, mode: int, beta: float,
    in_target: bool, device: int,
) -> Step | None:  # fmt: skip
    """Return the launch for the gradient; None if tensors must become fp32."""
    names = "x", "target"
    if mode == REVERSE:
        x, target, mode, in_target, names = target, x, LOGARITHM, not in_target, names[::-1]
    elif mode == MIXED and in_target:
        x, target, beta, in_target, names = target, x, 1.0 - beta, False, names[::-1]
    each = total is None  # the gradient of every element
    work = _work(x, target, grad) if each else _work(x, target)
    if work is None:
        return None
    variant, sizes, grid, how = work
    launch = _BWD.bind(variant, device, *grid)
    numbers = *sizes, *([] if each else [0]), labels_int64(labels), ignore, *how, mode, int(in_target), beta
    return Step(launch, *names, "labels", "grad", "total", "grad" if each else 0, "out", *numbers)
