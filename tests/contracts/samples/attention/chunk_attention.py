"""Samples and calls of ``chunk_attention``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.attention.chunk_attention import FORWARD


def _call(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    qkv = x.detach().bfloat16().view(-1, 1, 256).repeat(1, 1, 2)  # two heads of q of 128, one of k and one of v
    cache = qkv.new_ones(qkv.shape[0], 5, 1, 128)
    rope = rtkernels.rope_table(8, 128, device=x.device)
    return rtkernels.chunk_attention(qkv, cache, cache, rope, prefix=3)


CALLS = {"chunk_attention": _call}


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    qkv, k, v = (
        torch.randn(*shape, generator=g, device=device).bfloat16()
        for shape in ((1, 3, 512), (1, 9, 1, 128), (1, 9, 1, 128))
    )
    yield FORWARD, (qkv, k, v, *rtkernels.rope_table(12, 128, device=device), 8, 0.1, True)
