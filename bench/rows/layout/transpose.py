"""Benchmark rows of ``transpose``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.layout.transpose import TRANSPOSE


def rows() -> Iterator[Row]:
    for dtype, label in ((torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8"), (torch.float32, "fp32")):

        def make(device: str, generator: torch.Generator, dtype: torch.dtype = dtype) -> dict[str, Any]:
            return {"x": torch.randn(8192, 8192, device=device, generator=generator).to(dtype)}

        yield Row(
            name="transpose",
            shape=f"8192x8192 {label}",
            make=make,
            ours=lambda x: TRANSPOSE(x, 0, 1, 1),
            torch=lambda x: x.t().contiguous(),
            bytes=2 * 8192 * 8192 * dtype.itemsize,
        )

    def make_heads(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(2, 4096, 32, 128, dtype=torch.bfloat16, device=device, generator=generator)}

    yield Row(
        name="transpose_heads",
        shape="b2s4096h32d128",
        make=make_heads,
        ours=lambda x: TRANSPOSE(x, 1, 2, 1),
        torch=lambda x: x.transpose(1, 2).contiguous(),
        bytes=4 * 2 * 4096 * 32 * 128,
    )
