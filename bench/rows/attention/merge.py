"""Benchmark rows of ``merge``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.attention.merge import merge_attention


def _plain(a, lse_a, b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weights = ((part - lse).exp().transpose(1, 2).unsqueeze(-1) for part in (lse_a, lse_b))
    return sum(weight * part.float() for weight, part in zip(weights, (a, b), strict=True)).to(a.dtype), lse


def rows() -> Iterator[Row]:
    batch, length, heads, width = 2, 8192, 16, 128

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        a, b = (
            torch.randn(batch, length, heads, width, device=device, generator=generator).bfloat16() for _ in range(2)
        )
        lse_a, lse_b = (torch.randn(batch, heads, length, device=device, generator=generator) for _ in range(2))
        return {"a": a, "lse_a": lse_a, "b": b, "lse_b": lse_b}

    yield Row(
        name="merge_attention",
        shape=f"{batch}x{length} {heads} heads of {width}",
        make=make,
        ours=lambda a, lse_a, b, lse_b: merge_attention((a, b), (lse_a, lse_b)),
        torch=_plain,
        bytes=batch * length * heads * (6 * width + 12),
    )
