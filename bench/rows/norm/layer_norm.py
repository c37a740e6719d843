"""Benchmark rows of ``layer_norm``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.norm.layer_norm import BACKWARD, FORWARD


def _plain_rows(h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centred = h - h.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


def _torch_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    return (_plain_rows(x.to(math_dtype), eps)[0] * weight + bias).to(x.dtype)


def _torch_bwd(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    d = dy.to(math_dtype)
    normalised, rstd = _plain_rows(x.to(math_dtype), eps)
    g = d * weight.to(math_dtype)
    dx = rstd * (g - g.mean(-1, keepdim=True) - normalised * (g * normalised).mean(-1, keepdim=True))
    return dx.to(x.dtype), torch.stack(((d * normalised).sum(0), d.sum(0))).to(weight.dtype)


_SHAPES = ((8192, 2048), (8192, 4096), (1, 1024), (16, 4096), (128, 4096))


def pair(rows: int, cols: int) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size."""
    n = rows * cols * 2

    def make(device: str, generator: torch.Generator, *, backward: bool) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

        inputs = {"x": normal(rows, cols), "weight": normal(cols), "bias": normal(cols), "eps": 1e-5}
        return {"dy": normal(rows, cols), **inputs} if backward else inputs

    forward = Row(
        name="layer_norm_fwd",
        shape=f"{rows}x{cols}",
        make=lambda device, g: make(device, g, backward=False),
        ours=lambda x, weight, bias, eps: FORWARD(x, weight, bias, eps, 0.0),
        torch=_torch_fwd,
        fused=lambda x, weight, bias, eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
        bytes=2 * n + 4 * cols,
    )
    backward = Row(
        name="layer_norm_bwd",
        shape=f"{rows}x{cols}",
        make=lambda device, g: make(device, g, backward=True),
        ours=lambda dy, x, weight, bias, eps: BACKWARD(dy, x, weight, bias, None, eps, 0.0, True),
        torch=_torch_bwd,
        bytes=3 * n + 6 * cols,
    )
    return forward, backward


def rows() -> Iterator[Row]:
    for rows, cols in _SHAPES:
        forward, backward = pair(rows, cols)
        yield forward
        if rows >= 8192:
            yield backward
