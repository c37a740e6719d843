"""Benchmark rows of ``sage``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.attention.attention import head_by_head
from bench.rows.row import Row
from rtkernels.ops.attention.sage import sage_attention


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


def rows() -> Iterator[Row]:
    for length in (2048, 8192):

        def make(device: str, generator: torch.Generator, length=length) -> dict[str, Any]:
            return {
                name: torch.randn(4, length, 32, 128, device=device, generator=generator).bfloat16()
                for name in ("q", "k", "v")
            }

        yield Row(
            name="sage_attention",
            shape=f"4x{length} 32 heads of 128 causal, int8 and bfloat16",
            make=make,
            ours=lambda q, k, v: sage_attention(q, k, v, causal=True),
            torch=_plain,
            exact=head_by_head(_plain, torch.float64),
            bytes=2 * 4 * length * 32 * 128 * 4,
        )
