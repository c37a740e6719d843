"""Benchmark rows of ``column_absmax``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.quant.column_absmax import ABSMAX


def rows() -> Iterator[Row]:
    rows, cols = 8192, 4096

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)}

    yield Row(
        name="column_absmax",
        shape=f"{rows}x{cols}",
        make=make,
        ours=lambda x: ABSMAX(x, None, None),
        torch=lambda x: x.abs().amax(0).to(x.dtype if x.dtype == torch.float64 else torch.float32),
        bytes=2 * rows * cols + 4 * cols,
    )
