"""Benchmark rows of ``rope``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.rope.rope_operators import FORWARD


def _torch_fwd(q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    math_dtype = torch.promote_types(q.dtype, torch.float32)
    cos, sin = (t.to(math_dtype).unsqueeze(1) for t in tables)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.to(math_dtype).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    return rotated(q), rotated(k)


def forward(batch: int, length: int, q_heads: int, k_heads: int, dim: int) -> Row:
    """Return the forward row of a size."""

    def make(device: str, g: torch.Generator) -> dict[str, Any]:
        def normal(heads: int) -> Tensor:
            return torch.randn(batch, length, heads, dim, dtype=torch.bfloat16, device=device, generator=g)

        place = torch.arange(length, device=device, dtype=torch.float32)
        angle = torch.outer(place, 10000.0 ** -(torch.arange(0, dim, 2, device=device) / dim))
        return {"q": normal(q_heads), "k": normal(k_heads), "tables": (angle.cos(), angle.sin())}

    return Row(
        name="rope_fwd",
        shape=f"b{batch}s{length}q{q_heads}kv{k_heads}d{dim}",
        make=make,
        ours=lambda q, k, tables: FORWARD(q, k, "bshd", "bshd", 0, 0, 0, False, *tables, None, None, "", 0, 1, 1.0),
        torch=_torch_fwd,
        bytes=2 * 2 * batch * length * (q_heads + k_heads) * dim + 2 * 4 * length * dim // 2,
    )


def rows() -> Iterator[Row]:
    yield forward(2, 4096, 32, 8, 128)
