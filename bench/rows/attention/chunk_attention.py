"""Benchmark rows of ``chunk_attention``: the action tokens of pi0.5, and chunks of wider batches of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from bench.rows.row import Row, in_fp32

# Tokens, prefix, heads of q and of k, width.
SIZES = ((10, 968, 8, 1, 256), (16, 816, 16, 2, 128))


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    """A small call."""
    cache, rope = x.new_ones(1, 8, 1, 128), rtkernels.rope_table(16, 128, device=x.device)
    return {"chunk_attention": lambda: rtkernels.chunk_attention(x[None, :2, :512], cache, cache, rope, prefix=8)}


def _inputs(device: str, generator: torch.Generator, size: tuple[int, int, int, int, int]) -> dict[str, Any]:
    tokens, prefix, heads, kv_heads, width = size
    qkv, k, v = (
        torch.randn(*shape, device=device, generator=generator).bfloat16()
        for shape in ((1, tokens, (heads + 2 * kv_heads) * width), *((1, prefix, kv_heads, width),) * 2)
    )
    cos, sin = rtkernels.rope_table(prefix + tokens, width, device=device)
    return {"qkv": qkv, "k": k, "v": v, "cos": cos, "sin": sin}


def _ours(qkv: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rtkernels.chunk_attention(qkv, k, v, (cos, sin), prefix=k.shape[1], constant=True)


def _torch(qkv: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    prefix, kv_heads, width = k.shape[1:]
    heads = qkv.view(1, qkv.shape[1], -1, width)

    def rotated(t: Tensor) -> Tensor:
        low, high = in_fp32(t).chunk(2, -1)
        c, s = (table[prefix:, None].to(low.dtype) for table in (cos, sin))
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(t.dtype)

    q, new_k, new_v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    keys, values = torch.cat([k, rotated(new_k)], 1), torch.cat([v, new_v], 1)
    q, keys, values = (t.transpose(1, 2) for t in (rotated(q), keys, values))
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2)


def at(size: tuple[int, int, int, int, int]) -> Row:
    """Return the row of a size."""
    tokens, prefix, heads, kv_heads, width = size
    return Row(
        name="chunk_attention",
        shape=f"{tokens} over {prefix}, {heads}/{kv_heads} heads of {width}",
        make=partial(_inputs, size=size),
        ours=_ours,
        torch=_torch,
        bytes=2 * width * (2 * prefix * kv_heads + tokens * (2 * heads + 2 * kv_heads)),
    )


def rows() -> Iterator[Row]:
    """All sizes, bf16."""
    for size in SIZES:
        yield at(size)
