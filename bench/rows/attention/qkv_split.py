"""Benchmark rows of ``qkv_split``, at the sizes of policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.attention.qkv_split import qkv_split
from rtkernels.ops.rope.rope_table import rope_table


def _torch(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    dim = qkv.shape[-1] // (heads + 2 * kv)
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv, kv), -2)
    c, s = cos[: qkv.shape[0], None], sin[: qkv.shape[0], None]

    def rotated(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return rotated(q), rotated(k), v.contiguous()


def rows() -> Iterator[Row]:
    for tokens, heads, kv, dim in ((10, 8, 1, 256), (968, 8, 1, 256), (1024, 16, 8, 128)):

        def make(
            device: str, generator: torch.Generator, tokens: int = tokens, cols: int = (heads + 2 * kv) * dim,
            dim: int = dim, heads: int = heads, kv: int = kv,
        ) -> dict[str, Any]:  # fmt: skip
            qkv = torch.randn(tokens, cols, dtype=torch.bfloat16, device=device, generator=generator)
            cos, sin = rope_table(tokens, dim, device=device)
            return {"qkv": qkv, "cos": cos, "sin": sin, "heads": heads, "kv": kv}

        yield Row(
            name="qkv_split_rope", shape=f"{tokens} tokens, {heads} + {kv} heads of {dim}", make=make,
            ours=lambda qkv, cos, sin, heads, kv: qkv_split(qkv, heads, kv, rope=(cos, sin)), torch=_torch,
            bytes=4 * tokens * (heads + 2 * kv) * dim + 4 * tokens * dim,
        )  # fmt: skip
