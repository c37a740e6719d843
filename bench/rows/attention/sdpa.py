"""Benchmark rows of ``sdpa``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.row import Row
from rtkernels.ops.attention.sdpa import sdpa


def rows() -> Iterator[Row]:
    batch, heads, length, width = 4, 16, 2048, 128

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        shape = (batch, heads, length, width)
        q, k, v = (torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(3))
        mask = torch.rand(batch, 1, 1, length, device=device, generator=generator) > 0.1
        return {"q": q, "k": k, "v": v, "mask": mask}

    yield Row(
        name="sdpa",
        shape=f"{batch}x{heads}x{length}x{width} bool mask",
        make=make,
        ours=lambda q, k, v, mask: sdpa(q, k, v, mask),
        torch=lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
        bytes=8 * batch * heads * length * width,
    )
