"""The matrix products of gn_kernels by name: a ``[m, k]`` contiguous, b ``[k, n]`` whose transposed is contiguous.

Two 4-bit codes in a byte are those of neighbours along k, the first in the low half. Scales of 4-bit floats are in
blocks of 128 x 4. Unlike there, sizes need not be multiples of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.scaled_mm import scaled_mm

_ACCUMULATORS = {None: "auto", torch.float32: "fp32", torch.float16: "fp16", torch.int32: "int32"}


def int4_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact int32 ``[m, n]`` of int4 a ``[m, k/2]`` and b ``[k/2, n]`` (int8)."""
    return scaled_mm(a, b, packed="int4", b_layout="kn")


def row_scaled_int4_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The same times float32 scales ``[m, 1]`` and ``[1, n]``, in bfloat16."""
    return scaled_mm(a, b, scale_a, scale_b, recipe="row", packed="int4", b_layout="kn")


def fp8_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return bfloat16 ``[m, n]`` of fp8 operands."""
    return scaled_mm(a, b, b_layout="kn", out_dtype=torch.bfloat16)


def row_scaled_fp8_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The same times float32 scales ``[m, 1]`` and ``[1, n]``."""
    return scaled_mm(a, b, scale_a, scale_b, recipe="row", b_layout="kn", out_dtype=torch.bfloat16)


def mxfp4_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return bfloat16 ``[m, n]`` of e2m1 operands (two in a byte) with an e8m0 scale for 32 of them."""
    scales = scale_a.reshape(-1), scale_b.reshape(-1)
    return scaled_mm(a, b, *scales, recipe="mx32", packed="e2m1", bias=bias, b_layout="kn")


def nvfp4_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, output_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return bfloat16 ``[m, n]`` of e2m1 operands with an e4m3 scale for 16 of them and one float32 for the result."""
    scales = scale_a.reshape(-1), scale_b.reshape(-1)
    return scaled_mm(
        a, b, *scales, recipe="nvfp4", packed="e2m1", global_scale=output_scale, bias=bias, b_layout="kn"
    )  # fmt: skip


def mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    acc_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of floats of 16 or 32 bits (any strides), fp8 or int8, with scales ``[m, 1]`` and ``[1, n]``.

    Args:
        a: ``[m, k]``.
        b: ``[k, n]``.
        scale_a: float32, or None.
        scale_b: float32, or None.
        bias: ``[n]``, added in fp32.
        acc_dtype: float32, float16 or int32: how products are summed.
        out_dtype: None: that of the operands if they are floats of 16 or 32 bits, bfloat16 for fp8 and with scales,
            int32 for int8.
    """
    if acc_dtype not in _ACCUMULATORS:
        raise ArgumentError(f"acc_dtype is {acc_dtype}; expected float32, float16 or int32")
    backend = "torch" if a.dtype == torch.float32 and a.is_cuda else "auto"
    return scaled_mm(
        a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, acc=_ACCUMULATORS[acc_dtype], b_layout="kn",
        backend=backend,
    )  # fmt: skip


def block2d_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the product of int8 or fp8 operands whose tiles have a scale each: ``[m/q, k/q]`` and ``[k/q, n/q]``."""
    return scaled_mm(a, b, scale_a, scale_b, recipe="tile", b_layout="kn", out_dtype=out_dtype)
