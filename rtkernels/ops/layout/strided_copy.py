"""Copies between tensors of any strides, with sums along a dimension, or through a table of 256. Not public."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same, divisor, vector_bytes
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Step, Steps
from rtkernels.runtime.operator.registry import Op

_DIMS = 5
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}
_KERNEL = Kernel(
    "layout/strided_copy.cu", "strided_copy", template="T VEC TABLE", max_registers=64,
    args="in:ptr out:ptr table:ptr count:i64 "
    + " ".join(f"divisor_{i}:i64 size_{i}:i64" for i in range(1, _DIMS))
    + " " + " ".join(f"in_{i}:i64" for i in range(_DIMS)) + " " + " ".join(f"out_{i}:i64" for i in range(_DIMS))
    + " sum_count:i64 sum_stride:i64",
    variants=[(t, n, False) for t, width in _WIDTH.items() for n in (1, width)] + [(t, 1, True) for t in _WIDTH],
)  # fmt: skip


def _merged(x: Meta, out: Meta) -> list[tuple[int, int, int]]:
    """Return size and both strides of the dimensions; neighbours are merged if both tensors allow it."""
    dims = [d for d in zip(x.shape, x.stride, out.stride, strict=True) if d[0] != 1] or [(1, 1, 1)]
    result = [dims[0]]
    for size, a, b in dims[1:]:
        upper, upper_a, upper_b = result[-1]
        if upper_a == size * a and upper_b == size * b:
            result[-1] = (upper * size, a, b)
        else:
            result.append((size, a, b))
    return result


def _check(x: Meta, out: Meta, table: Meta | None, summed: bool) -> None:
    check_same("out", tuple(out.shape), tuple(x.shape[1:] if summed else x.shape), "shape")
    wanted = out.dtype if table is None else torch.uint8
    check_same("x", x.dtype, wanted, "dtype", of="out")
    if out.dtype not in DTYPE_TOKEN or (table is not None and (table.dtype, table.numel()) != (out.dtype, 256)):
        raise ArgumentError(f"out has dtype {out.dtype}; expected bfloat16, float16 or float32, and a table of 256")


def _plan(x: Meta, out: Meta, table: Meta | None, summed: bool, device: int) -> Steps:
    sum_count, sum_stride = (x.shape[0], x.stride[0]) if summed else (1, 0)
    if summed:
        x = x._replace(shape=x.shape[1:], stride=x.stride[1:])
    dims = _merged(x, out)
    if len(dims) > _DIMS or x.numel() >= 2**31:
        return IN_TORCH
    token, size = out.token, out.dtype.itemsize
    n, together = 1, 1  # elements in a vector, and in what the kernel takes for an element
    if table is None and dims[-1][1:] == (1, 1):
        steps = [dims[-1][0], sum_stride * (sum_count > 1), *(step for d in dims[:-1] for step in d[1:])]
        fitting = vector_bytes(x.misaligned, out.misaligned, *(step * size for step in steps))
        if fitting == 16:
            n = together = _WIDTH[token]
        elif fitting >= 4 and size == 2 and sum_count == 1:
            token, together = "fp32", 2  # two of them: nothing is computed
    if together > 1:
        last = (dims[-1][0] // together, 1, 1)
        dims = [(count, a // together, b // together) for count, a, b in dims[:-1]] + [last]
        sum_stride //= together
    dims = [(1, 0, 0)] * (_DIMS - len(dims)) + dims
    count = x.numel() // together
    grid = min(-(-count // 256), 32 * device_info(device).sm_count)
    sizes = [value for d in dims[1:] for value in (divisor(d[0]), d[0])]
    launch = _KERNEL.bind((token, n, table is not None), device, grid, 256)
    numbers = count, *sizes, *(d[1] for d in dims), *(d[2] for d in dims), sum_count, sum_stride
    return Steps(Step(launch, "x", "out", "table", *numbers))


def _reference(x: Tensor, out: Tensor, table: Tensor | None, summed: bool) -> None:
    if x.numel() == 0:
        return
    if table is not None:
        out.copy_(table[x.int()])
    elif not summed:
        out.copy_(x)
    else:
        total = x[0].float()
        for j in range(1, x.shape[0]):
            total = total + x[j].float()
        out.copy_(total)


COPY = Operator(
    "strided_copy", (Argument("x", None), InPlace("out", None, over="x"), Dense("table", None, optional=True)),
    options="bool summed", results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


def strided_copy(x: Tensor, out: Tensor, table: Tensor | None = None, *, summed: bool = False) -> None:
    """Write x to `out`, of the same shape and any strides, or ``table[x]``.

    `summed`: the sum over the first dimension of x, which `out` has not, in fp32 and in order.
    """
    COPY(x, out, table, summed)


OP = Op("strided_copy", public=(), kernels=(_KERNEL,), torch_ops=(COPY,))
