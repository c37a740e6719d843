"""Average and maximum pooling of the last two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import TOKEN
from rtkernels.ops.window.places import THREADS, blocks, divisors, plane_strides
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Argument, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_DOWN = 2  # elements of a column that a thread owns: kDown in window/pool.cu
_TYPES = [(t, kernel) for t in ("bf16", "fp16", "fp32") for kernel in (0, 2, 3)]
_PLANES = (
    "count:i64 channels:i64 height:i64 width:i64 out_height:i64 out_width:i64 x_batch:i64 x_channel:i64 x_row:i64 "
    "x_column:i64 groups:i64 group_divisor:i64 width_divisor:i64"
)
_WINDOW = "kernel_h:i64 kernel_w:i64 stride_h:i64 stride_w:i64 pad_h:i64 pad_w:i64"
_AVG = Kernel(
    "window/pool.cu", "avg_pool", template="T KERNEL", variants=_TYPES, max_registers=72, tier="aten",
    args=f"x:ptr y:ptr {_PLANES} {_WINDOW} count_padding:i64 divisor:i64",
)  # fmt: skip
_MAX = Kernel(
    "window/pool.cu", "max_pool", template="T KERNEL", variants=_TYPES, max_registers=72, tier="aten",
    args=f"x:ptr y:ptr indices:ptr {_PLANES} {_WINDOW} dilation_h:i64 dilation_w:i64",
)  # fmt: skip


def _planes(x: Meta, out: tuple[int, int]) -> tuple[int, tuple[int, ...]]:
    """Return the grid, and the kernels' arguments that say where elements are. x: (batch, channels, height, width)."""
    groups = -(-out[0] // _DOWN)
    count = x.shape[0] * x.shape[1] * groups * out[1]
    channels, *strides = plane_strides(x)
    places = *x.shape[2:], *out, *strides, groups, *divisors(count, groups, out[1])
    return blocks(count), (count, channels, *places)


def _plan_avg(x: Meta, out: tuple, window: tuple, count_padding: bool, divisor: int, device: int) -> Steps:
    grid, planes = _planes(x, out)
    launch = _AVG.bind((TOKEN[x.dtype], _unrolled(x, window)), device, grid, THREADS)
    return Steps(Step(launch, "x", "y", *planes, *window, int(count_padding), divisor))


def _plan_max(x: Meta, out: tuple, window: tuple, dilation: tuple, device: int) -> Steps:
    grid, planes = _planes(x, out)
    kernel = _unrolled(x, window) if dilation == (1, 1) else 0
    launch = _MAX.bind((TOKEN[x.dtype], kernel), device, grid, THREADS)
    return Steps(Step(launch, "x", "y", "indices", *planes, *window, *dilation))


def _unrolled(x: Meta, window: tuple[int, ...]) -> int:
    """Return the size of windows that kernels know when they are compiled; 0 for others."""
    return window[0] if window[0] == window[1] and window[0] in (2, 3) and x.stride[3] == 1 else 0


def _outputs(x: Meta, out: tuple[int, int]) -> tuple[Memory]:
    return (Memory((*x.shape[:2], *out), x.dtype),)


_AVERAGE = Primitive(
    "avg_pool", (Argument("x", None),), "out, window, count_padding, divisor", results="y", outputs=_outputs,
    plan=_plan_avg,
)  # fmt: skip
_MAXIMUM = Primitive(
    "max_pool", (Argument("x", None),), "out, window, dilation", results="y indices",
    outputs=lambda x, out: (*_outputs(x, out), Memory((*x.shape[:2], *out), torch.int64)), plan=_plan_max,
)  # fmt: skip


def avg_pool(x: Tensor, out: tuple[int, int], window: tuple[int, ...], count_padding: bool, divisor: int) -> Tensor:
    """Return averages of windows.

    Args:
        x: (batch, channels, height, width), bfloat16, float16 or float32; any strides; not empty.
        out: Height and width of the result.
        window: Height and width of a window, its strides, and the padding.
        count_padding: Padding counts as elements that are 0.
        divisor: What sums are divided by; 0: the elements that count.

    Returns:
        Dense, (batch, channels, *out).
    """
    return _AVERAGE(x, out, window, count_padding, divisor)


def max_pool(
    x: Tensor, out: tuple[int, int], window: tuple[int, ...], dilation: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the largest element of each window, and its int64 index in the plane; arguments as for ``avg_pool``.

    Args:
        x: As for ``avg_pool``.
        out: As for ``avg_pool``.
        window: As for ``avg_pool``.
        dilation: Distance of a window's elements, down and across.

    Returns:
        Both dense, (batch, channels, *out).
    """
    return _MAXIMUM(x, out, window, dilation)


OP = Op("pooling", public=(), kernels=(_AVG, _MAX), torch_ops=())
