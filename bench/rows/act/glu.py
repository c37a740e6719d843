"""Benchmark rows of ``glu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.act.glu import BACKWARD, FORWARD


def _torch_fwd(x: Tensor, act: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _torch_bwd(dy: Tensor, x: Tensor, act: str) -> Tensor:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(math_dtype).chunk(2, -1)
    d = dy.to(math_dtype)
    s = torch.sigmoid(gate)
    return torch.cat((d * up * (s + gate * s * (1 - s)), d * gate * s), -1).to(x.dtype)


def pair(rows: int, cols: int) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size; ``cols`` of the result."""
    n = rows * cols * 2  # bytes of y

    def make(device: str, generator: torch.Generator, *, backward: bool) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

        inputs = {"x": normal(rows, 2 * cols), "act": "silu"}
        return {"dy": normal(rows, cols), **inputs} if backward else inputs

    forward = Row(
        name="glu_fwd",
        shape=f"{rows}x2x{cols}",
        make=lambda device, g: make(device, g, backward=False),
        ours=lambda x, act: FORWARD(x, None, None, act),
        torch=_torch_fwd,
        bytes=3 * n,
    )
    backward = Row(
        name="glu_bwd",
        shape=f"{rows}x2x{cols}",
        make=lambda device, g: make(device, g, backward=True),
        ours=lambda dy, x, act: BACKWARD(dy, x, None, None, act, False)[0],
        torch=_torch_bwd,
        bytes=5 * n,
    )
    return forward, backward


def rows() -> Iterator[Row]:
    """Yield the benchmark rows."""
    for cols in (2048, 4096, 8192, 14336):
        yield from pair(8192, cols)
