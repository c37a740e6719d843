"""Benchmark rows of ``indexer_logits`` and ``indexer_topk``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.attention.indexer import indexer_logits, indexer_topk

_HEADS, _WIDTH, _COUNT = 64, 128, 2048


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    q, weights = x.view(-1, 8, 128), x[:, :8].float()
    return {
        "indexer_logits": lambda: indexer_logits(q, q[:, 0], weights),
        "indexer_topk": lambda: indexer_topk(q, q[:, 0], weights, 16),
    }


def _plain(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, outs = k.to(torch.bfloat16), []
    for first in range(0, q.shape[0], 64):  # scores of all heads would take 17 GB
        scores = (q[first : first + 64].to(torch.bfloat16) @ rows.mT).float().relu()
        outs.append((scores * weights[first : first + 64].unsqueeze(-1)).sum(1))
    return torch.cat(outs)


def rows() -> Iterator[Row]:
    for tokens, keys in ((2048, 32768), (64, 65536)):

        def make(device: str, generator: torch.Generator, size=(tokens, keys)) -> dict[str, Any]:
            tokens, keys = size
            q = torch.randn(tokens, _HEADS, _WIDTH, device=device, generator=generator).to(torch.float8_e4m3fn)
            k = torch.randn(keys, _WIDTH, device=device, generator=generator).to(torch.float8_e4m3fn)
            return {"q": q, "k": k, "weights": torch.rand(tokens, _HEADS, device=device, generator=generator)}

        shape = f"{tokens} tokens, {_HEADS} heads of {_WIDTH}, {keys} keys, e4m3"
        inputs, flops = tokens * _HEADS * (_WIDTH + 4) + keys * _WIDTH, 2 * tokens * _HEADS * keys * _WIDTH
        yield Row(
            name="indexer_logits", shape=shape, make=make, ours=lambda q, k, weights: indexer_logits(q, k, weights),
            torch=_plain, bytes=inputs + 4 * tokens * keys, flops=flops,
        )  # fmt: skip
        yield Row(
            name="indexer_topk", shape=shape, make=make,
            ours=lambda q, k, weights: indexer_topk(q, k, weights, _COUNT),
            torch=lambda q, k, weights: _plain(q, k, weights).topk(_COUNT).indices.sort(-1).values.int(),
            bytes=inputs + 4 * tokens * _COUNT, flops=flops,
        )  # fmt: skip
