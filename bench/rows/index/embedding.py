"""Benchmark rows of ``embedding``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.index.embedding import ADD, BACKWARD, FORWARD, NO_PADDING

_TOKENS, _ROWS, _COLS = 8192, 157184, 2048


_SHARED_IDS = 10000  # values that the ids of the accumulating rows are drawn from: many tokens share a row


def _make(device: str, generator: torch.Generator, backward: bool) -> dict[str, Any]:
    like = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    results: dict[str, Any] = {"ids": torch.randint(0, _ROWS, (_TOKENS,), device=device, generator=generator)}
    if backward:
        results["dy"] = torch.randn(_TOKENS, _COLS, **like)
    return {**results, "weight": torch.randn(_ROWS, _COLS, **like)}


def _make_into(device: str, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.randint(0, _SHARED_IDS, (_TOKENS,), device=device, generator=generator)
    dy = torch.randn(_TOKENS, _COLS, dtype=torch.bfloat16, device=device, generator=generator)
    return {"dy": dy, "ids": ids, "main_grad": torch.zeros(_ROWS, _COLS, dtype=dtype, device=device)}


def _add(dy: Tensor, ids: Tensor, main_grad: Tensor) -> Tensor:
    ADD(main_grad, dy, ids, 0, NO_PADDING)
    return main_grad


def _twice(dy: Tensor, ids: Tensor, main_grad: Tensor) -> Tensor:
    """main_grad after two calls from zero: the bench compares the result of the second one."""
    return torch.zeros(main_grad.shape, dtype=torch.float64, device=dy.device).index_add_(0, ids, 2 * dy.double())


def rows() -> Iterator[Row]:
    shape = f"{_TOKENS}x{_ROWS}x{_COLS}"
    moved, ids_bytes = _TOKENS * _COLS * 2, _TOKENS * 8
    yield Row(
        name="embedding_fwd",
        shape=shape,
        make=lambda device, g: _make(device, g, False),
        ours=lambda ids, weight: FORWARD(weight, ids, 0),
        torch=lambda ids, weight: torch.nn.functional.embedding(ids, weight),
        bytes=2 * moved + ids_bytes,
    )
    yield Row(
        name="embedding_bwd",
        shape=shape,
        make=lambda device, g: _make(device, g, True),
        ours=lambda ids, dy, weight: BACKWARD(dy, ids, weight.shape[0], 0, NO_PADDING),
        torch=lambda ids, dy, weight: torch.zeros_like(weight).index_add_(0, ids, dy),
        bytes=moved + _ROWS * _COLS * 2 + ids_bytes,
    )
    touched = round(_SHARED_IDS * (1 - (1 - 1 / _SHARED_IDS) ** _TOKENS))
    for name, dtype in (("embedding_bwd_into", torch.bfloat16), ("embedding_bwd_into_fp32", torch.float32)):
        yield Row(
            name=name,
            shape=shape,
            make=lambda device, g, dtype=dtype: _make_into(device, g, dtype),
            ours=_add,
            torch=lambda dy, ids, main_grad: main_grad.index_add_(0, ids, dy.to(main_grad.dtype)),
            exact=_twice,
            bytes=moved + 2 * touched * _COLS * dtype.itemsize + ids_bytes,
        )
