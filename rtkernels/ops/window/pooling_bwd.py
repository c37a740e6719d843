"""Gradients of pooling of the last two dimensions."""

from __future__ import annotations

from torch import Tensor

from rtkernels.ops.shared.strided import TOKEN, product
from rtkernels.ops.window.places import THREADS, blocks, divisors
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_SIZES = (
    "count:i64 height:i64 width:i64 out_height:i64 out_width:i64 height_divisor:i64 width_divisor:i64 kernel_h:i64 "
    "kernel_w:i64 stride_h:i64 stride_w:i64 pad_h:i64 pad_w:i64 stride_h_divisor:i64 stride_w_divisor:i64"
)


def _kernel(entry: str, tensors: str, options: str) -> Kernel:
    variants = [(t, v) for t, each in (("bf16", 8), ("fp16", 8), ("fp32", 4)) for v in (each, 1)]
    return Kernel(
        "window/pool_bwd.cu", entry, template="T VEC", variants=variants, max_registers=72, tier="aten",
        args=f"{tensors} {_SIZES} {options}",
    )  # fmt: skip


_AVG = _kernel("avg_pool_bwd", "dy:ptr dx:ptr", "count_padding:i64 divisor:i64")
_MAX = _kernel("max_pool_bwd", "dy:ptr indices:ptr dx:ptr", "dilation_h:i64 dilation_w:i64")


def _launch(kernel: Kernel, dy: Meta, size: tuple[int, int], window: tuple, device: int) -> tuple:
    """Return a launch that covers dx, and the kernels' arguments that say where elements are."""
    each = 16 // dy.dtype.itemsize
    each = each if size[1] % each == 0 else 1
    count = product(dy.shape[:2]) * product(size) // each
    launch = kernel.bind((TOKEN[dy.dtype], each), device, blocks(count), THREADS)
    by = divisors(count, size[0], size[1] // each)
    return launch, (count, *size, *dy.shape[2:], *by, *window, divisor(window[2]), divisor(window[3]))


def _plan_avg(dy: Meta, size: tuple, window: tuple, count_padding: bool, divided_by: int, device: int) -> Steps:
    launch, places = _launch(_AVG, dy, size, window, device)
    return Steps(Step(launch, "dy", "dx", *places, int(count_padding), divided_by))


def _plan_max(dy: Meta, indices: Meta, size: tuple, window: tuple, dilation: tuple, device: int) -> Steps:
    launch, places = _launch(_MAX, dy, size, window, device)
    return Steps(Step(launch, "dy", "indices", "dx", *places, *dilation))


_AVERAGE = Primitive(
    "avg_pool_bwd", (Dense("dy", None),), "size, window, count_padding, divided_by", results="dx", plan=_plan_avg,
    outputs=lambda dy, size: (Memory((*dy.shape[:2], *size), dy.dtype),),
)  # fmt: skip
_MAXIMUM = Primitive(
    "max_pool_bwd", (Dense("dy", None), Dense("indices", None)), "size, window, dilation", results="dx", plan=_plan_max,
    outputs=lambda dy, size: (Memory((*dy.shape[:2], *size), dy.dtype),),
)  # fmt: skip


def avg_pool_grad(
    dy: Tensor, size: tuple[int, int], window: tuple[int, ...], count_padding: bool, divisor: int
) -> Tensor:
    """Return the gradient of ``avg_pool``'s x.

    Args:
        dy: (batch, channels, height, width) of the result, bfloat16, float16 or float32; not empty.
        size: Height and width of x.
        window: As for ``avg_pool``.
        count_padding: As for ``avg_pool``.
        divisor: As for ``avg_pool``.

    Returns:
        Dense, (batch, channels, *size).
    """
    return _AVERAGE(dy, size, window, count_padding, divisor)


def max_pool_grad(
    dy: Tensor, indices: Tensor, size: tuple[int, int], window: tuple[int, ...], dilation: tuple[int, int]
) -> Tensor:
    """Return the gradient of ``max_pool``'s x; arguments as for ``avg_pool_grad``.

    Args:
        dy: As for ``avg_pool_grad``.
        indices: int64, of dy's shape: what ``max_pool`` returned.
        size: As for ``avg_pool_grad``.
        window: As for ``avg_pool``.
        dilation: As for ``max_pool``.

    Returns:
        As ``avg_pool_grad``.
    """
    return _MAXIMUM(dy, indices, size, window, dilation)


OP = Op("pooling_bwd", public=(), kernels=(_AVG, _MAX), torch_ops=())
