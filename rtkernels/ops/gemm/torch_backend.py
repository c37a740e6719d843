"""Products by torch's own calls (cuBLASLt on a GPU): ``backend="torch"``. What they cannot do is an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import reference
from rtkernels.ops.gemm.product import FP8
from rtkernels.ops.gemm.scaled_mm_plan import ScaledMm, describe
from rtkernels.runtime.torch_private import without_autocast

_MM = (torch.bfloat16, torch.float16, torch.float32)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, global_scale: Tensor | None,
    bias: Tensor | None, add: Tensor | None, recipe: str, b_layout: str, packed: str | None, act: str | None,
    out_dtype: torch.dtype | None, acc: str, backend: str, out: Tensor | None, accumulate: bool, quant_out: str | None,
) -> Tensor:  # fmt: skip
    """Return the product; bias, add and act are torch calls behind it, each rounded to `out_dtype`."""
    call = ScaledMm(
        a, b, scale_a, scale_b, global_scale, bias, add, recipe, b_layout, packed, act, out_dtype, acc, "auto", out,
        accumulate, quant_out,
    )  # fmt: skip
    described = describe(call.metas)
    p, dtype = described.product, described.dtype
    if quant_out is not None or global_scale is not None:
        raise ArgumentError("backend is 'torch'; expected 'auto' for quant_out and global_scale")
    left = a.reshape(p.m, a.shape[-1])
    right = b.transpose(-2, -1) if not described.right.flipped else b  # [k, n]
    with without_autocast("cuda" if a.is_cuda else "cpu"):
        result = _multiplied(described, left, right, scale_a, scale_b, dtype)
    if bias is not None:
        result = result + bias.to(result.dtype)
    result = result.reshape(described.shape)
    if add is not None:
        result = result + add.to(result.dtype)
    result = reference.activated(result, act)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _multiplied(described: Any, a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, dtype: torch.dtype) -> Tensor:
    p = described.product
    if a.dtype in _MM and a.dtype == b.dtype:
        if dtype == a.dtype:
            return torch.mm(a, b)
        if a.is_cuda and dtype == torch.float32:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.mm(a, b).to(dtype)
    if p.a.token in FP8 and p.b.token in FP8:
        kinds = [None if s is None else (s.rows, s.depth) for s in (p.scale_a, p.scale_b)]
        one = torch.ones((), dtype=torch.float32, device=a.device)
        if kinds in ([None, None], [(0, 0), (0, 0)]):
            scales = [one if s is None else s.reshape(()) for s in (scale_a, scale_b)]
        elif kinds == [(1, 0), (1, 0)]:
            scales = [scale_a.reshape(p.m, 1), scale_b.reshape(1, p.n)]
        else:
            raise ArgumentError(
                "backend is 'torch'; expected scales of the tensor or of rows (recipe 'tensor' or 'row')"
            )
        fast = p.sums == "fast"
        if p.k % 16 or p.n % 16:
            raise ArgumentError(f"backend is 'torch' and n, k are {p.n}, {p.k}; expected multiples of 16")
        return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=fast)
    if p.a.token == p.b.token == "int8" and p.scale_a is None and p.scale_b is None:
        return torch._int_mm(a, b)
    raise ArgumentError(f"backend is 'torch', which has no product of {p.a.token} and {p.b.token} with these scales")
