"""Products in torch's argument order: ``_scaled_mm``, ``_int_mm``, ``_grouped_mm``, ``_scaled_grouped_mm``."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.grouped_mm import grouped_mm as grouped
from rtkernels.ops.gemm.grouped_mm import grouped_wgrad
from rtkernels.ops.gemm.scaled_mm import scaled_mm as scaled

_BLOCK_SCALES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``torch._scaled_mm``: a ``[m, k]``, b ``[k, n]`` contiguous along k; scales per tensor, row or block."""
    if scale_result is not None:
        raise ArgumentError("scale_result is given; expected None: quant_out= of rtkernels.scaled_mm quantises results")
    blocks = scale_a.dtype in _BLOCK_SCALES
    if blocks:
        scale_a, scale_b = scale_a.reshape(-1), scale_b.reshape(-1)
    along_k = blocks or (scale_a.dim() == 2 and scale_a.shape[1] > 1)
    return scaled(
        a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype or torch.bfloat16, b_layout="kn",
        acc="fast" if use_fast_accum and not along_k else "auto",
    )  # fmt: skip


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``torch._int_mm``: int8 a ``[m, k]`` and b ``[k, n]`` contiguous along k, to int32."""
    return scaled(a, b, b_layout="kn")


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``torch._grouped_mm``: a ``[rows, k]`` and b ``[groups, k, n]``; or a ``[m, rows]`` and b ``[rows, n]``."""
    if b.dim() == 3:
        return grouped(a, b, offs=offs, out_dtype=out_dtype, b_layout="kn")
    return grouped_wgrad(a.t(), b, offs=offs, out_dtype=out_dtype or a.dtype)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``torch._scaled_grouped_mm``: a ``[rows, k]``, b ``[groups, k, n]``; scales ``[rows]`` and ``[groups, n]``."""
    return grouped(
        a, b, scale_a, scale_b, offs=offs, recipe="row", out_dtype=out_dtype or torch.bfloat16, b_layout="kn"
    )
