"""Tensors of any strides as kernels see them: dimensions merged where their elements allow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Dims = list[tuple[int, ...]]  # of each dimension its size and its stride in each tensor; the innermost last

TOKEN = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "u8",
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
# The `type` arguments of kernels that store a type known at run time (common/values.cuh).
STORED = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.float32: 2,
    torch.int64: 3,
    torch.int32: 4,
    torch.uint8: 5,
    torch.bool: 5,
}


def merged(dims: Dims) -> Dims:
    """Return the dimensions without those of size 1; neighbours are merged if the strides of all tensors allow it."""
    result: Dims = []
    for size, *strides in dims:
        if size == 1:
            continue
        if result and all(outer == size * inner for outer, inner in zip(result[-1][1:], strides, strict=True)):
            result[-1] = (result[-1][0] * size, *strides)
        else:
            result.append((size, *strides))
    return result


def padded(dims: Dims, count: int, tensors: int) -> Dims | None:
    """Return exactly `count` dimensions, the first ones of size 1; None if there are more."""
    if len(dims) > count:
        return None
    return [(1, *[0] * tensors)] * (count - len(dims)) + dims


def by_stride(dims: Dims) -> Dims:
    """Return dimensions with the smallest stride of the first tensor last."""
    return sorted(dims, key=lambda dim: -dim[1])


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def product(sizes: Sequence[int]) -> int:
    """Return the product of sizes."""
    count = 1
    for size in sizes:
        count *= size
    return count
