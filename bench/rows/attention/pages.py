"""Benchmark rows of ``attention_varlen`` over pages: chunks of prompts, and batches of chunks and decoding steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.row import Row
from rtkernels.ops.attention.attention import attention_varlen

_HEADS, _HEADS_KV, _WIDTH, _PAGE, _FACTOR = 32, 8, 128, 64, 16


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, table: torch.Tensor, queries: Sequence[int],
    keys: Sequence[int], factor: float,
) -> torch.Tensor:  # fmt: skip
    """One request after the other, from a copy of its pages."""
    results = []
    for part, pages, length in zip(q.split(list(queries)), table.long(), keys, strict=True):
        own = [cache[pages].flatten(0, 1)[:length].to(q.dtype).transpose(0, 1) * factor for cache in (k, v)]
        mask = torch.ones(len(part), length, dtype=torch.bool, device=q.device).tril(length - len(part))
        y = F.scaled_dot_product_attention(
            part.transpose(0, 1)[None], own[0][None], own[1][None], attn_mask=mask, enable_gqa=True
        )
        results.append(y[0].transpose(0, 1))
    return torch.cat(results)


def at(words: str, queries: Sequence[int], keys: Sequence[int], dtype: torch.dtype) -> Row:
    """Return the row of requests with these numbers of new tokens, and of keys with them; pages in a random order."""
    coded, width = dtype != torch.bfloat16, -(-max(keys) // _PAGE)
    factor = 1 / _FACTOR if coded else 1.0

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        count = width * len(keys)
        shape = (count, _PAGE, _HEADS_KV, _WIDTH)
        k, v = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
        order = torch.randperm(count, device=device, generator=generator).int()
        ends = torch.tensor([0, *queries], device=device).cumsum(0).int()
        return {
            "q": torch.randn(sum(queries), _HEADS, _WIDTH, device=device, generator=generator).bfloat16(),
            "k": (k / factor).to(dtype), "v": (v / factor).to(dtype), "ends": ends,
            "lengths": torch.tensor(keys, dtype=torch.int32, device=device), "table": order.view(len(keys), width),
            "scale": torch.full((_HEADS_KV,), factor, device=device) if coded else None,
        }  # fmt: skip

    def ours(q, k, v, ends, lengths, table, scale):
        return attention_varlen(
            q, k, v, ends, None, max(queries), max(keys), causal=True, seqused_k=lengths, page_table=table,
            k_scale=scale, v_scale=scale,
        )  # fmt: skip

    def plain(q, k, v, ends, lengths, table, scale):
        return _plain(q, k, v, ends, table, queries, keys, factor)

    pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(queries, keys, strict=True))
    return Row(
        name="attention_pages",
        shape=f"{words}, {_HEADS}/{_HEADS_KV} heads of {_WIDTH}, pages of {_PAGE} {dtype}".replace("torch.", ""),
        make=make,
        ours=ours,
        torch=plain,
        bytes=2 * sum(keys) * _HEADS_KV * _WIDTH * dtype.itemsize + 4 * sum(queries) * _HEADS * _WIDTH,
        flops=4 * pairs * _HEADS * _WIDTH,
    )


def rows() -> Iterator[Row]:
    mixed = [1] * 24 + [1024] * 4
    yield at("8 x 512 over 2048 keys", [512] * 8, [2048] * 8, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        yield at("24 x 1 and 4 x 1024 over 4096 keys", mixed, [4096] * len(mixed), dtype)
