"""Nearest upsampling of the last two dimensions, and its gradient."""

from __future__ import annotations

from torch import Tensor

from rtkernels.ops.shared.strided import TOKEN, product
from rtkernels.ops.window.places import THREADS, blocks, divisors, plane_strides
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_NEAREST = Kernel(
    "window/upsample.cu", "upsample_nearest", template="BYTES", variants=[(2,), (4,)], max_registers=48,
    tier="aten",
    args="x:ptr y:ptr count:i64 channels:i64 height:i64 width:i64 out_height:i64 out_columns:i64 x_batch:i64 "
    "x_channel:i64 x_row:i64 x_column:i64 height_divisor:i64 width_divisor:i64 scale_h:f64 scale_w:f64 vectors:i64",
)  # fmt: skip
_TWICE = Kernel(
    "window/upsample.cu", "upsample_twice", template="BYTES", variants=[(2,), (4,)], max_registers=48,
    tier="aten",
    args="x:ptr y:ptr count:i64 channels:i64 height:i64 vectors:i64 x_batch:i64 x_channel:i64 x_row:i64 "
    "height_divisor:i64 width_divisor:i64",
)  # fmt: skip
_NEAREST_BWD = Kernel(
    "window/upsample.cu", "upsample_nearest_bwd", template="T", variants=TYPES, max_registers=48, tier="aten",
    args="dy:ptr dx:ptr count:i64 height:i64 width:i64 out_height:i64 out_width:i64 height_divisor:i64 "
    "width_divisor:i64 scale_h:f64 scale_w:f64 factor_h:i64 factor_w:i64",
)  # fmt: skip
_TWICE_BWD = Kernel(
    "window/upsample.cu", "upsample_twice_bwd", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="dy:ptr dx:ptr count:i64 vectors:i64 width_divisor:i64",
)  # fmt: skip


def _factors(size: tuple[int, ...], out: tuple[int, ...], scales: tuple[float, ...]) -> tuple[int, ...]:
    """Return how often each element is there, down and across; 0 where that is not the same for all.

    Powers of two below 2^24: there the product by the scale that says so elsewhere is exact.
    """
    sizes = zip(size, out, scales, strict=True)
    times = [m // n if m % n == 0 and m < 2**24 and scale == n / m else 0 for n, m, scale in sizes]
    return tuple(0 if factor & (factor - 1) else factor for factor in times)


def _plan_nearest(x: Meta, out: tuple, scales: tuple, device: int) -> Steps:
    planes, (height, width), size = product(x.shape[:2]), x.shape[2:], x.dtype.itemsize
    channels, *strides = plane_strides(x)
    each = 8 // size
    aligned8 = x.misaligned % 8 == 0 and strides[3] == 1 and not any(step % each for step in strides[:3])
    if aligned8 and width % each == 0 and _factors(x.shape[2:], out, scales) == (2, 2):
        vectors = width // each
        count = planes * height * vectors
        launch = _TWICE.bind((size,), device, blocks(count), THREADS)
        places = count, channels, height, vectors, *strides[:3], *divisors(count, height, vectors)
        return Steps(Step(launch, "x", "y", *places))
    each = 16 // size
    vectors = out[1] % each == 0
    columns = out[1] // each if vectors else out[1]
    count = planes * out[0] * columns
    launch = _NEAREST.bind((size,), device, blocks(count), THREADS)
    places = count, channels, height, width, out[0], columns, *strides, *divisors(count, out[0], columns)
    return Steps(Step(launch, "x", "y", *places, *scales, int(vectors)))


def _plan_nearest_bwd(dy: Meta, size: tuple, scales: tuple, device: int) -> Steps:
    planes, (height, width), out = product(dy.shape[:2]), size, tuple(dy.shape[2:])
    each, factors = 16 // dy.dtype.itemsize, _factors(size, out, scales)
    if dy.misaligned == 0 and width % each == 0 and factors == (2, 2):
        count, vectors = planes * height * width // each, width // each
        launch = _TWICE_BWD.bind((TOKEN[dy.dtype],), device, blocks(count), THREADS)
        return Steps(Step(launch, "dy", "dx", count, vectors, *divisors(count, vectors)))
    count = planes * height * width
    launch = _NEAREST_BWD.bind((TOKEN[dy.dtype],), device, blocks(count), THREADS)
    return Steps(Step(launch, "dy", "dx", count, *size, *out, *divisors(count, *size), *scales, *factors))


_UPSAMPLED = Primitive(
    "upsample_nearest", (Argument("x", None),), "out, scales", results="y", plan=_plan_nearest,
    outputs=lambda x, out: (Memory((*x.shape[:2], *out), x.dtype),),
)  # fmt: skip
_UPSAMPLED_GRAD = Primitive(
    "upsample_nearest_bwd", (Dense("dy", None),), "size, scales", results="dx", plan=_plan_nearest_bwd,
    outputs=lambda dy, size: (Memory((*dy.shape[:2], *size), dy.dtype),),
)  # fmt: skip


def upsample_nearest(x: Tensor, out: tuple[int, int], scales: tuple[float, float]) -> Tensor:
    """Return each element of x as often as it is the nearest.

    Args:
        x: (batch, channels, height, width), elements of 2 or 4 bytes; any strides; not empty.
        out: Height and width of the result.
        scales: Elements of x for each of the result, down and across.

    Returns:
        Dense, (batch, channels, *out).
    """
    return _UPSAMPLED(x, out, scales)


def upsample_nearest_grad(dy: Tensor, size: tuple[int, int], scales: tuple[float, float]) -> Tensor:
    """Return the gradient of ``upsample_nearest``'s x.

    Args:
        dy: (batch, channels, height, width) of the result, bfloat16, float16 or float32; not empty.
        size: Height and width of x.
        scales: As for ``upsample_nearest``.

    Returns:
        Dense, (batch, channels, *size).
    """
    return _UPSAMPLED_GRAD(dy, size, scales)


OP = Op("upsampling", public=(), kernels=(_NEAREST, _TWICE, _NEAREST_BWD, _TWICE_BWD), torch_ops=())
