"""Gradients of pooling and nearest upsampling of the last two dimensions."""

from __future__ import annotations

from torch import Tensor

from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import TOKEN, product
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Dense, Meta
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_SIZES = "count:i64 height:i64 width:i64 out_height:i64 out_width:i64"
_WINDOW = "kernel_h:i64 kernel_w:i64 stride_h:i64 stride_w:i64 pad_h:i64 pad_w:i64"


def _kernel(entry: str, args: str) -> Kernel:
    types = [("bf16",), ("fp16",), ("fp32",)]
    return Kernel("window/pool_bwd.cu", entry, template="T", variants=types, max_registers=64, tier="aten", args=args)


_AVG = _kernel("avg_pool_bwd", f"dy:ptr dx:ptr {_SIZES} {_WINDOW} count_padding:i64 divisor:i64")
_MAX = _kernel("max_pool_bwd", f"dy:ptr indices:ptr dx:ptr {_SIZES} {_WINDOW} dilation_h:i64 dilation_w:i64")
_NEAREST = _kernel("upsample_nearest_bwd", f"dy:ptr dx:ptr {_SIZES} scale_h:f64 scale_w:f64")


def _launch(kernel: Kernel, dy: Meta, size: tuple[int, int], device: int) -> tuple:
    """Return a launch with a thread for each element of dx, and the kernels' arguments that say where elements are."""
    count = product(dy.shape[:2]) * product(size)
    grid = -(-count // _THREADS)
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    return kernel.bind((TOKEN[dy.dtype],), device, grid, _THREADS), (count, *size, *dy.shape[2:])


def _plan_avg(dy: Meta, size: tuple, window: tuple, count_padding: bool, divisor: int, device: int) -> Steps:
    launch, places = _launch(_AVG, dy, size, device)
    return Steps(Step(launch, "dy", "dx", *places, *window, int(count_padding), divisor))


def _plan_max(dy: Meta, indices: Meta, size: tuple, window: tuple, dilation: tuple, device: int) -> Steps:
    launch, places = _launch(_MAX, dy, size, device)
    return Steps(Step(launch, "dy", "indices", "dx", *places, *window, *dilation))


def _plan_nearest(dy: Meta, size: tuple, scales: tuple, device: int) -> Steps:
    launch, places = _launch(_NEAREST, dy, size, device)
    return Steps(Step(launch, "dy", "dx", *places, *scales))


_AVERAGE = Primitive(
    "avg_pool_bwd", (Dense("dy", None),), "size, window, count_padding, divisor", results="dx", plan=_plan_avg,
    outputs=lambda dy, size, *_: (Memory((*dy.shape[:2], *size), dy.dtype),),
)  # fmt: skip
_MAXIMUM = Primitive(
    "max_pool_bwd", (Dense("dy", None), Dense("indices", None)), "size, window, dilation", results="dx", plan=_plan_max,
    outputs=lambda dy, indices, size, *_: (Memory((*dy.shape[:2], *size), dy.dtype),),
)  # fmt: skip
_UPSAMPLED = Primitive(
    "upsample_nearest_bwd", (Dense("dy", None),), "size, scales", results="dx", plan=_plan_nearest,
    outputs=lambda dy, size, *_: (Memory((*dy.shape[:2], *size), dy.dtype),),
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


def upsample_nearest_grad(dy: Tensor, size: tuple[int, int], scales: tuple[float, float]) -> Tensor:
    """Return the gradient of ``upsample_nearest``'s x.

    Args:
        dy: As for ``avg_pool_grad``.
        size: As for ``avg_pool_grad``.
        scales: As for ``upsample_nearest``.

    Returns:
        As ``avg_pool_grad``.
    """
    return _UPSAMPLED(dy, size, scales)


OP = Op("pooling_bwd", public=(), kernels=(_AVG, _MAX, _NEAREST), torch_ops=())
