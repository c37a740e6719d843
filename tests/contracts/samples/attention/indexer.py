"""Samples and calls of ``indexer_logits`` and ``indexer_topk``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.attention.indexer import BEST, FORWARD


def _given(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    keys = torch.arange(8.0 * 64, dtype=torch.float32, device=x.device).view(8, 64).sin().bfloat16()
    return x.detach().view(-1, 4, 64).bfloat16(), keys, x.detach()[:, :4]


CALLS = {
    "indexer_logits": lambda x, ids: rtkernels.indexer_logits(*_given(x)),
    "indexer_topk": lambda x, ids: rtkernels.indexer_topk(*_given(x), 3),
}


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, weights, scales = normal(3, 2, 32).bfloat16(), normal(10, 32).bfloat16(), normal(3, 2), normal(10).abs()
    numbers = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    table = torch.tensor([[1], [0], [1]], dtype=torch.int32, device=device)
    paged = (q, k.view(2, 5, 32), weights, scales.view(2, 5), None, numbers + 3, table)
    for values in ((q, k, weights, None, None, None, None), (q, k, weights, scales, numbers, numbers + 6, None), paged):
        yield FORWARD, values
        yield BEST, (*values, 4)
