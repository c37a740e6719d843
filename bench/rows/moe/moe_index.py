"""Benchmark rows of ``moe_index``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.moe import moe_index_layout as layout
from rtkernels.ops.moe.moe_index import INDEX, ROW_ID_MAP
from rtkernels.ops.moe.moe_index_layout import max_rows


def _experts(device: str, g: torch.Generator, tokens: int, experts: int, top_k: int, used: int) -> Tensor:
    """Return the top experts of random scores, of the first `used` ones."""
    scores = torch.randn(tokens, used, device=device, generator=g)
    return scores.topk(top_k, -1).indices * (experts // used)


def _row_id(tokens: int, experts: int, top_k: int, multiple_of: int) -> Row:
    def make(device: str, g: torch.Generator) -> dict[str, Any]:
        routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        return {"routing_map": routing_map.scatter_(1, _experts(device, g, tokens, experts, top_k, experts), True)}

    def plain(routing_map: Tensor) -> Tensor:
        counts = routing_map.sum(0)
        padded = (counts + multiple_of - 1) // multiple_of * multiple_of
        first = padded.cumsum(0) - padded
        return torch.where(routing_map, first + routing_map.cumsum(0) - 1, -1).int()

    rows = max_rows(tokens, top_k, experts, multiple_of)
    return Row(
        name="row_id_map",
        shape=f"{tokens}x{experts}",
        make=make,
        ours=lambda routing_map: ROW_ID_MAP(routing_map, multiple_of, rows)[0],
        torch=plain,
        exact=plain,
        bytes=5 * tokens * experts,
    )


def _index_row(what: str, tokens: int, experts: int, top_k: int, used: int, multiple_of: int = 16) -> Row:
    rows = max_rows(tokens, top_k, experts, multiple_of)

    def make(device: str, g: torch.Generator) -> dict[str, Any]:
        return {"routing": _experts(device, g, tokens, experts, top_k, used), "experts": experts, "rows": rows}

    def plain(routing: Tensor, experts: int, rows: int) -> tuple[Tensor, ...]:
        return tuple(layout.build(routing, experts, multiple_of, rows))

    return Row(
        name="moe_index",
        shape=f"{tokens} tokens, {experts} experts, top {top_k}{what}",
        make=make,
        ours=lambda routing, experts, rows: INDEX(routing, experts, top_k, multiple_of, rows),
        torch=plain,
        exact=plain,
        bytes=tokens * top_k * 16 + rows * 4 + experts * 8,
    )


def rows() -> Iterator[Row]:
    yield _row_id(8192, 256, 8, 16)
    yield _index_row("", 8192, 256, 8, 256)
    yield _index_row("", 32768, 32, 2, 32)
    yield _index_row(", all to one", 65536, 256, 1, 1)
    yield _index_row(", half of them empty", 8192, 64, 8, 32)
