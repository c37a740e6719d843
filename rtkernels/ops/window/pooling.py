"""Average and maximum pooling, and nearest upsampling, of the last two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import TOKEN, product
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Argument, Meta
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_TYPES = [("bf16",), ("fp16",), ("fp32",)]
_PLANES = (
    "count:i64 channels:i64 height:i64 width:i64 out_height:i64 out_width:i64 x_batch:i64 x_channel:i64 x_row:i64 "
    "x_column:i64"
)
_WINDOW = "kernel_h:i64 kernel_w:i64 stride_h:i64 stride_w:i64 pad_h:i64 pad_w:i64"
_AVG = Kernel(
    "window/pool.cu", "avg_pool", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args=f"x:ptr y:ptr {_PLANES} {_WINDOW} count_padding:i64 divisor:i64",
)  # fmt: skip
_MAX = Kernel(
    "window/pool.cu", "max_pool", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args=f"x:ptr y:ptr indices:ptr {_PLANES} {_WINDOW} dilation_h:i64 dilation_w:i64",
)  # fmt: skip
_NEAREST = Kernel(
    "window/pool.cu", "upsample_nearest", template="BYTES", variants=[(1,), (2,), (4,)], max_registers=48, tier="aten",
    args=f"x:ptr y:ptr {_PLANES} scale_h:f64 scale_w:f64 vectors:i64",
)  # fmt: skip


def _planes(x: Meta, out: tuple[int, int]) -> tuple[int, tuple[int, ...]]:
    """Return the grid, and the kernels' arguments that say where elements are. x: (batch, channels, height, width)."""
    batch, channels, height, width = x.shape
    count = batch * channels * product(out)
    grid = -(-count // _THREADS)
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    return grid, (count, channels, height, width, *out, *x.stride)


def _outputs(x: Meta, out: tuple[int, int], *_: object) -> tuple[Memory]:
    return (Memory((*x.shape[:2], *out), x.dtype),)


def _plan_avg(x: Meta, out: tuple, window: tuple, count_padding: bool, divisor: int, device: int) -> Steps:
    grid, planes = _planes(x, out)
    launch = _AVG.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    return Steps(Step(launch, "x", "y", *planes, *window, int(count_padding), divisor))


def _plan_max(x: Meta, out: tuple, window: tuple, dilation: tuple, device: int) -> Steps:
    grid, planes = _planes(x, out)
    launch = _MAX.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    return Steps(Step(launch, "x", "y", "indices", *planes, *window, *dilation))


def _plan_nearest(x: Meta, out: tuple, scales: tuple, device: int) -> Steps:
    grid, (count, *places) = _planes(x, out)
    each = 16 // x.dtype.itemsize
    if vectors := out[1] % each == 0:
        count //= each
        grid = -(-count // _THREADS)
    launch = _NEAREST.bind((x.dtype.itemsize,), device, grid, _THREADS)
    return Steps(Step(launch, "x", "y", count, *places, *scales, int(vectors)))


_AVERAGE = Primitive(
    "avg_pool", (Argument("x", None),), "out, window, count_padding, divisor", results="y", outputs=_outputs,
    plan=_plan_avg,
)  # fmt: skip
_MAXIMUM = Primitive(
    "max_pool", (Argument("x", None),), "out, window, dilation", results="y indices",
    outputs=lambda x, out, *_: (*_outputs(x, out), Memory((*x.shape[:2], *out), torch.int64)), plan=_plan_max,
)  # fmt: skip
_UPSAMPLED = Primitive(
    "upsample_nearest", (Argument("x", None),), "out, scales", results="y", outputs=_outputs, plan=_plan_nearest
)


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


def upsample_nearest(x: Tensor, out: tuple[int, int], scales: tuple[float, float]) -> Tensor:
    """Return each element of x as often as it is the nearest.

    Args:
        x: (batch, channels, height, width), elements of 1, 2 or 4 bytes; any strides; not empty.
        out: Height and width of the result.
        scales: Elements of x for each of the result, down and across.

    Returns:
        Dense, (batch, channels, *out).
    """
    return _UPSAMPLED(x, out, scales)


OP = Op("pooling", public=(), kernels=(_AVG, _MAX, _NEAREST), torch_ops=())
