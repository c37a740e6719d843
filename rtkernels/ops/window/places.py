"""What kernels of windows know of planes: ``cuda_src/window/places.cuh``."""

from __future__ import annotations

from rtkernels.runtime.layout import GRID_LIMIT, divisor
from rtkernels.runtime.operator.declared import Meta

THREADS = 256


def blocks(count: int) -> int:
    """Return the grid for `count` threads.

    Raises:
        OverflowError: A grid has fewer blocks than that takes.
    """
    if -(-count // THREADS) > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    return -(-count // THREADS)


def divisors(count: int, *sizes: int) -> tuple[int, ...]:
    """Return what numbers below `count` are divided by; zeros if these may not be below 2^31."""
    return tuple(divisor(size) if count < 2**31 else 0 for size in sizes)


def plane_strides(x: Meta) -> tuple[int, ...]:
    """Return channels and four strides; batch and channels as one dimension where they can be, for a division less."""
    batch, channels = x.shape[:2]
    if batch == 1 or channels == 1 or x.stride[0] == channels * x.stride[1]:
        step = x.stride[0] if channels == 1 else x.stride[1]
        return 1, step, 0, *x.stride[2:]
    return channels, *x.stride
