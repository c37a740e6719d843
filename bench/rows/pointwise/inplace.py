"""Benchmark rows of ``inplace``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.pointwise.inplace import add_


def rows() -> Iterator[Row]:
    rows, cols = 8192, 8192

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(rows, cols, device=device, generator=generator)
        return {"x": x, "y": torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)}

    yield Row(
        name="add_in_place",
        shape=f"{rows}x{cols} fp32 += bf16",
        make=make,
        # Every byte moves, and x stays what it is however often this is called.
        ours=lambda x, y: add_(x, y, alpha=0.0),
        torch=lambda x, y: x.add_(y, alpha=0.0),
        bytes=10 * rows * cols,
    )
