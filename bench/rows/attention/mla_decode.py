"""Benchmark rows of ``mla_decode``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.attention.mla_decode import mla_decode

_WIDTH, _VALUE, _PAGE = 576, 512, 64


def _dense(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    k = cache[table.long()].flatten(1, 2)
    scores = (q @ k.transpose(-1, -2)).float() * _WIDTH**-0.5
    return scores.softmax(-1).to(q.dtype) @ k[..., :_VALUE]


def rows() -> Iterator[Row]:
    # The last one is that of the peers' benchmarks.
    for batch, length, heads in ((1, 8192, 128), (16, 8192, 16), (128, 1024, 128), (128, 8192, 128)):

        def make(device: str, generator: torch.Generator, size=(batch, length, heads)) -> dict[str, Any]:
            batch, length, heads = size
            pages = batch * length // _PAGE
            order = torch.randperm(pages, device=device, generator=generator).int()
            return {
                "q": torch.randn(batch, heads, _WIDTH, device=device, generator=generator).bfloat16(),
                "cache": torch.randn(pages, _PAGE, _WIDTH, device=device, generator=generator).bfloat16(),
                "lengths": torch.full((batch,), length, dtype=torch.int32, device=device),
                "table": order.view(batch, length // _PAGE),
            }

        yield Row(
            name="mla_decode",
            shape=f"{batch} x {length} latents of {_WIDTH}, {heads} heads, pages of {_PAGE}",
            make=make,
            ours=lambda q, cache, lengths, table: mla_decode(q, cache, lengths, page_table=table),
            torch=_dense,
            bytes=2 * batch * (length * _WIDTH + heads * (_WIDTH + _VALUE)),
            flops=2 * batch * heads * length * (_WIDTH + _VALUE),
        )
