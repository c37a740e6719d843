"""Benchmark rows of ``append_kv_cache``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.attention.append_kv_cache import append_kv_cache


def _ours(k, v, k_cache, v_cache, lengths):
    append_kv_cache(k, v, k_cache, v_cache, lengths)
    return k_cache


def _plain(k, v, k_cache, v_cache, lengths):
    batch = torch.arange(k.shape[0], device=k.device).view(-1, 1)
    place = lengths.view(-1, 1).long() + torch.arange(k.shape[1], device=k.device)
    k_cache[batch, place] = k
    v_cache[batch, place] = v
    return k_cache


def rows() -> Iterator[Row]:
    for batch, tokens in ((128, 1), (4, 2048)):

        def make(device: str, generator: torch.Generator, size=(batch, tokens)) -> dict[str, Any]:
            batch, tokens = size
            k, v = (torch.randn(batch, tokens, 8, 128, device=device, generator=generator).bfloat16() for _ in range(2))
            caches = {
                name: torch.zeros(batch, 2 * tokens, 8, 128, dtype=k.dtype, device=device)
                for name in ("k_cache", "v_cache")
            }
            lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
            return {"k": k, "v": v, **caches, "lengths": lengths}

        yield Row(
            name="append_kv_cache",
            shape=f"{batch}x{tokens} 8 heads of 128",
            make=make,
            ours=_ours,
            torch=_plain,
            bytes=8 * batch * tokens * 8 * 128,
        )
