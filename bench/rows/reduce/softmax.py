"""Benchmark rows of ``softmax``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.reduce.softmax import BACKWARD, FORWARD


def _torch_bwd(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    math_dtype = torch.promote_types(y.dtype, torch.float32)
    g, v = dy.to(math_dtype), y.to(math_dtype)
    return (v * (g - (g * v).sum(-1, keepdim=True))).to(y.dtype)


def pair(rows: int, cols: int) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size."""
    n = rows * cols * 2

    def make(device: str, generator: torch.Generator, *, backward: bool) -> dict[str, Any]:
        def normal() -> Tensor:
            return torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)

        x = normal()  # in the backward rows for torch's autograd only
        return {"dy": normal(), "x": x, "y": torch.softmax(x, -1)} if backward else {"x": x}

    forward = Row(
        name="softmax_fwd",
        shape=f"{rows}x{cols}",
        make=lambda device, g: make(device, g, backward=False),
        ours=lambda x: FORWARD(x, None, 1.0, False),
        torch=lambda x: torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1).to(x.dtype),
        fused=lambda x: torch.softmax(x, -1),
        bytes=2 * n,
    )
    backward = Row(
        name="softmax_bwd",
        shape=f"{rows}x{cols}",
        make=lambda device, g: make(device, g, backward=True),
        ours=lambda dy, y, x: BACKWARD(dy, y, None, 1.0, False),
        torch=_torch_bwd,
        bytes=3 * n,
    )
    return forward, backward


def rows() -> Iterator[Row]:
    for cols in (4096, 32768):
        yield from pair(8192, cols)
