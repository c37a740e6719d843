"""Benchmark rows of ``rms_norm``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.norm.rms_norm import BACKWARD, FORWARD


def pair(rows: int, cols: int) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size."""
    n = rows * cols * 2

    def make(device: str, generator: torch.Generator, *, backward: bool) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

        inputs = {"x": normal(rows, cols), "weight": normal(cols), "eps": 1e-6}
        return {"dy": normal(rows, cols), **inputs} if backward else inputs

    forward = Row(
        name="rms_norm_fwd",
        shape=f"{rows}x{cols}",
        make=lambda device, g: make(device, g, backward=False),
        ours=lambda x, weight, eps: FORWARD(x, weight, eps, 0.0),
        torch=_torch_fwd,
        fused=lambda x, weight, eps: F.rms_norm(x, (x.shape[-1],), weight, eps),
        bytes=2 * n + 2 * cols,
    )
    backward = Row(
        name="rms_norm_bwd",
        shape=f"{rows}x{cols}",
        make=lambda device, g: make(device, g, backward=True),
        ours=lambda dy, x, weight, eps: BACKWARD(dy, x, weight, None, eps, 0.0, True),
        torch=_torch_bwd,
        bytes=3 * n + 4 * cols,
    )
    return forward, backward


def rows() -> Iterator[Row]:
    for cols in (2048, 4096, 8192):
        yield from pair(8192, cols)


def _torch_fwd(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float() if x.dtype != torch.float64 else x
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _torch_bwd(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    h, d, w = x.to(math_dtype), dy.to(math_dtype), weight.to(math_dtype)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    g = d * w
    dx = rstd * g - h * rstd**3 * (g * h).mean(-1, keepdim=True)
    return dx.to(x.dtype), (d * h * rstd).sum(0).to(weight.dtype)
