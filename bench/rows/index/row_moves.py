"""Benchmark rows of ``row_moves``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.index import row_moves_plan as plans
from rtkernels.ops.index.row_moves_operators import CHUNKS, SCATTER, SELECT

_TOKENS, _CHOICES, _COLS = 8192, 8, 2048


def _random_chunks(device: str, g: torch.Generator, chunks: int) -> dict[str, Tensor]:
    cuts = torch.randint(0, _TOKENS + 1, (chunks - 1,), generator=g, device=device).sort().values
    edges = torch.cat((cuts.new_zeros(1), cuts, cuts.new_full((1,), _TOKENS)))
    return {"counts": edges.diff(), "order": torch.randperm(chunks, generator=g, device=device)}


def rows() -> Iterator[Row]:
    routed, row_bytes = _TOKENS * _CHOICES, _COLS * 2

    def make(device: str, g: torch.Generator, rows: int) -> dict[str, Any]:
        """Every token is named as often as any other."""
        x = torch.randn(rows, _COLS, dtype=torch.bfloat16, device=device, generator=g)
        return {"x": x, "indices": (torch.randperm(routed, device=device, generator=g) % _TOKENS).int()}

    def make_chunks(device: str, g: torch.Generator) -> dict[str, Any]:
        x = torch.randn(_TOKENS, _COLS, dtype=torch.bfloat16, device=device, generator=g)
        return {"x": x, **_random_chunks(device, g, 256)}

    yield Row(
        name="index_select",
        shape=f"{routed} of {_TOKENS}x{_COLS}",
        make=lambda device, g: make(device, g, _TOKENS),
        ours=lambda x, indices: SELECT(x, indices, None)[0],
        torch=lambda x, indices: x[indices],
        bytes=(_TOKENS + routed) * row_bytes + routed * 4,
    )
    yield Row(
        name="scatter_add",
        shape=f"{routed}x{_COLS} to {_TOKENS}",
        make=lambda device, g: {**make(device, g, routed), "rows": _TOKENS},
        ours=lambda x, indices, rows: SCATTER(x, indices, rows, None),
        torch=lambda x, indices, rows: x.new_zeros(rows, x.shape[1]).index_add_(0, indices, x),
        bytes=(_TOKENS + routed) * row_bytes + routed * 4,
    )
    yield Row(
        name="sort_chunks",
        shape=f"256 of {_TOKENS}x{_COLS}",
        make=make_chunks,
        ours=lambda x, counts, order: CHUNKS(x, counts, order, None, False)[0],
        torch=lambda x, counts, order: x[plans.chunk_rows(counts, order, _TOKENS, False)],
        bytes=2 * _TOKENS * row_bytes + 256 * 16,
    )
