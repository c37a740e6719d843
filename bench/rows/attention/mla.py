"""Benchmark rows of ``mla``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.attention.attention import backward_row, head_by_head, too_large
from bench.rows.row import Row
from rtkernels.ops.attention.mla import mla_attention

_SCALE = 128**-0.5  # linghe has no other


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).float() * _SCALE
    scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1)
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=_SCALE
    ).transpose(1, 2)


def rows() -> Iterator[Row]:
    for batch, length, heads in ((8, 4096, 16), (1, 8192, 64)):  # the second one is linghe's

        def make(device: str, generator: torch.Generator, size=(batch, length, heads)) -> dict[str, Any]:
            return {
                name: torch.randn(*size, width, device=device, generator=generator).bfloat16()
                for name, width in (("q", 192), ("k", 192), ("v", 128))
            }

        pairs = batch * heads * length**2 // 2
        yield Row(
            name="mla_attention_fwd",
            shape=f"{batch}x{length} {heads} heads of 192/128 causal",
            make=make,
            ours=lambda q, k, v: mla_attention(q, k, v, scale=_SCALE),
            torch=head_by_head(_plain) if too_large(batch * heads * length**2) else _plain,
            exact=head_by_head(_plain, torch.float64),
            fused=_fused,
            bytes=2 * batch * length * heads * (2 * 192 + 2 * 128),
            flops=pairs * 2 * (192 + 128),
        )
        yield backward_row(
            "mla_attention_bwd", f"{batch}x{length} {heads} heads of 192/128 causal", make, _plain, _SCALE, True,
            pairs * 2 * (3 * 192 + 2 * 128), 2 * batch * length * heads * (4 * 192 + 4 * 128),
        )  # fmt: skip
