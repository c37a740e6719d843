"""Benchmark rows of ``attention``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.row import Row
from rtkernels.ops.attention.attention import attention, attention_varlen

# batch, heads of q, heads of k and v, length, width, causal
_SIZES = (
    (4, 16, 16, 4096, 128, False),
    (4, 16, 16, 4096, 128, True),
    (1, 32, 8, 16384, 128, True),
    (4, 32, 32, 4096, 64, True),
    (2, 16, 16, 4096, 256, True),
)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if causal:
        scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1 + k.shape[2] - q.shape[2])
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def rows() -> Iterator[Row]:
    for batch, heads, heads_kv, length, width, causal in _SIZES:

        def make(
            device: str, generator: torch.Generator, size=(batch, heads, heads_kv, length, width)
        ) -> dict[str, Any]:
            batch, heads, heads_kv, length, width = size
            shapes = {"q": heads, "k": heads_kv, "v": heads_kv}
            return {
                name: torch.randn(batch, length, count, width, device=device, generator=generator).bfloat16()
                for name, count in shapes.items()
            }

        mask = "causal" if causal else "full"
        yield Row(
            name="attention_fwd",
            shape=f"{batch}x{length} {heads}/{heads_kv} heads of {width} {mask}",
            make=make,
            ours=lambda q, k, v, causal=causal: attention(q, k, v, causal=causal),
            torch=lambda q, k, v, causal=causal: _plain(q, k, v, causal),
            fused=lambda q, k, v, causal=causal: _fused(q, k, v, causal),
            bytes=2 * batch * length * width * (2 * heads + 2 * heads_kv),
        )

    def make_packed(device: str, generator: torch.Generator) -> dict[str, Any]:
        qkv = torch.randn(16384, 3, 16, 128, device=device, generator=generator).bfloat16()
        ends = torch.arange(0, 16385, 2048, dtype=torch.int32, device=device)
        return {"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2], "ends": ends}

    yield Row(
        name="attention_varlen_fwd",
        shape="8 x 2048 of a packed qkv, 16 heads of 128 causal",
        make=make_packed,
        ours=lambda q, k, v, ends: attention_varlen(q, k, v, ends, ends, 2048, 2048, causal=True),
        torch=lambda q, k, v, ends: _plain(*(t.view(8, 2048, 16, 128) for t in (q, k, v)), True).flatten(0, 1),
        fused=lambda q, k, v, ends: _fused(*(t.view(8, 2048, 16, 128) for t in (q, k, v)), True).flatten(0, 1),
        bytes=2 * 16384 * 16 * 128 * 4,
    )
