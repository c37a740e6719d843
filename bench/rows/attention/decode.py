"""Benchmark rows of ``decode``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.row import Row
from rtkernels.ops.attention.decode import attention_decode

_HEADS, _HEADS_KV, _WIDTH, _PAGE = 32, 8, 128, 64


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    k, v = (cache[table.long()].flatten(1, 2).to(q.dtype).transpose(1, 2) * scale for cache in (k, v))
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)


def rows() -> Iterator[Row]:
    for batch, length, dtype in (
        (1, 8192, torch.bfloat16), (1, 65536, torch.bfloat16), (16, 8192, torch.bfloat16), (128, 1024, torch.bfloat16),
        (128, 8192, torch.bfloat16), (16, 8192, torch.float8_e4m3fn), (16, 8192, torch.int8),
    ):  # fmt: skip

        def make(device: str, generator: torch.Generator, size=(batch, length, dtype)) -> dict[str, Any]:
            batch, length, dtype = size
            pages = batch * length // _PAGE
            shape = (pages, _PAGE, _HEADS_KV, _WIDTH)
            k, v = ((torch.randn(shape, device=device, generator=generator) * 16).to(dtype) for _ in range(2))
            order = torch.randperm(pages, device=device, generator=generator).int()
            return {
                "q": torch.randn(batch, _HEADS, _WIDTH, device=device, generator=generator).bfloat16(),
                "k": k,
                "v": v,
                "lengths": torch.full((batch,), length, dtype=torch.int32, device=device),
                "table": order.view(batch, length // _PAGE),
                "scale": torch.full((), 1.0 / 16, device=device),
            }

        def ours(q, k, v, lengths, table, scale):
            scale = None if k.dtype == q.dtype else scale
            return attention_decode(q, k, v, lengths, page_table=table, k_scale=scale, v_scale=scale)

        yield Row(
            name="attention_decode",
            shape=f"{batch} x {length} keys, {_HEADS}/{_HEADS_KV} heads of {_WIDTH}, pages of {_PAGE} {dtype}".replace(
                "torch.", ""
            ),
            make=make,
            ours=ours,
            # Of the row's dtype, not of k's: the reference gets all of them in float64.
            torch=lambda q, k, v, lengths, table, scale, factor=1.0 if dtype == torch.bfloat16 else 1.0 / 16: _dense(
                q, k, v, table, factor
            ),
            bytes=2 * batch * length * _HEADS_KV * _WIDTH * dtype.itemsize + 4 * batch * _HEADS * _WIDTH,
        )
