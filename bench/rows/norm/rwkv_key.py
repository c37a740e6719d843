"""Benchmark rows of ``rwkv_key``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import rtkernels
from bench.rows.row import Row


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {"rwkv_key": lambda: rtkernels.rwkv_key(x, x[0], x, x[1], 16)}


def rows() -> Iterator[Row]:
    tokens, heads, width = 4096, 64, 64

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, dtype=torch.bfloat16, device=device, generator=generator)

        c = heads * width
        return {"k": normal(tokens, c), "kk": normal(c), "a": normal(tokens, c).sigmoid(), "ka": normal(c)}

    def plain(k: torch.Tensor, kk: torch.Tensor, a: torch.Tensor, ka: torch.Tensor) -> tuple[torch.Tensor, ...]:
        unit = torch.nn.functional.normalize((k * kk).view(tokens, heads, width), dim=-1).flatten(1)
        return k * (1 + (a - 1) * ka), unit, unit * a

    yield Row(
        name="rwkv_key", shape=f"{tokens}x{heads}x{width}", make=make,
        ours=lambda k, kk, a, ka: rtkernels.rwkv_key(k, kk, a, ka, heads), torch=plain,
        bytes=5 * 2 * tokens * heads * width,
    )  # fmt: skip
