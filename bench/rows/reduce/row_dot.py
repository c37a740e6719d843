"""Benchmark rows of ``row_dot``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.reduce.row_dot import BACKWARD, FORWARD


def pair(rows: int, cols: int) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size."""

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        x, y = (torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2))
        return {"x": x, "y": y}

    def make_bwd(device: str, generator: torch.Generator) -> dict[str, Any]:
        inputs = make(device, generator)
        return {"dy": torch.randn(rows, dtype=torch.bfloat16, device=device, generator=generator), **inputs}

    forward = Row(
        name="row_dot_fwd",
        shape=f"{rows}x{cols}",
        make=make,
        ours=lambda x, y: FORWARD(x, y),
        torch=lambda x, y: (x * y).sum(-1),
        bytes=4 * rows * cols + 2 * rows,
    )
    backward = Row(
        name="row_dot_bwd",
        shape=f"{rows}x{cols}",
        make=make_bwd,
        ours=lambda dy, x, y: BACKWARD(dy, x, y, True, True),
        torch=lambda dy, x, y: (dy[:, None] * y, dy[:, None] * x),
        bytes=8 * rows * cols + 2 * rows,
    )
    return forward, backward


def rows() -> Iterator[Row]:
    yield from pair(8192, 4096)
