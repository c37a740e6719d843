"""Benchmark rows of ``topk``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.router.topk import FORWARD


def rows() -> Iterator[Row]:
    rows = 8192
    for cols, k in ((256, 8), (128, 8), (1024, 8), (4096, 32)):
        for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, "_bf16")):
            if suffix and cols != 256:
                continue

            def make(device: str, generator: torch.Generator, *, cols=cols, k=k, dtype=dtype) -> dict[str, Any]:
                return {"x": torch.randn(rows, cols, device=device, generator=generator).to(dtype), "k": k}

            yield Row(
                name=f"topk{suffix}",
                shape=f"{rows}x{cols}k{k}",
                make=make,
                ours=lambda x, k: FORWARD(x, k, True)[0],  # torch orders equal numbers otherwise
                torch=lambda x, k: torch.topk(x, k).values,
                bytes=rows * (cols * dtype.itemsize + k * (dtype.itemsize + 8)),
            )
