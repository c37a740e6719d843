"""Benchmark rows of ``rms_norm_router``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.router.rms_norm_router import FORWARD
from rtkernels.ops.router.router_gemm_kernels import HIGH


def _torch(x: Tensor, weight: Tensor, router_weight: Tensor) -> tuple[Tensor, Tensor]:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.nn.functional.rms_norm(x.to(math_dtype), x.shape[-1:], weight.to(math_dtype), 1e-6).to(x.dtype)
    return y.to(math_dtype) @ router_weight.to(math_dtype).t(), y


def _row(rows: int, experts: int, depth: int) -> Row:
    def make(device: str, generator: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(rows, depth, dtype=torch.bfloat16, device=device, generator=generator)
        router_weight = (torch.randn(experts, depth, device=device, generator=generator) * 0.02).bfloat16()
        weight = torch.rand(depth, device=device, generator=generator).bfloat16() + 0.5
        return {"x": x, "weight": weight, "router_weight": router_weight}

    return Row(
        name="norm_router_quant",
        shape=f"{rows}x{experts}x{depth}",
        make=make,
        ours=lambda x, weight, router_weight: FORWARD(x, weight, router_weight, 1e-6, 0.0, HIGH, False, "column")[:2],
        torch=_torch,
        bytes=5 * rows * depth + rows * depth // 32 + 4 * rows * experts + 2 * experts * depth,
    )


def rows() -> Iterator[Row]:
    yield _row(8192, 256, 2048)
