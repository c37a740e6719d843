"""Samples and calls of ``sparse_mla``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.attention.sparse_mla import FORWARD

CALLS = {
    "sparse_mla": lambda x, ids: rtkernels.sparse_mla(
        x.detach().view(-1, 4, 64).bfloat16(), torch.ones(8, 64, dtype=torch.bfloat16, device=x.device), ids.int(),
        value_width=64,
    ),
}  # fmt: skip


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(3, 2, 576, generator=generator, device=device).bfloat16()
    kv = torch.randn(9, 576, generator=generator, device=device).bfloat16()
    codes = torch.randint(0, 100, (9, 656), generator=generator, device=device).to(torch.uint8)
    codes[:, 512:528] = torch.ones(9, 4, device=device).view(torch.uint8)
    codes[:, 528:] = kv[:, 512:].contiguous().view(torch.uint8)
    indices = torch.tensor([[0, 3, 8, -1], [5, 5, 9, 1], [-1, -1, -1, -1]], dtype=torch.int32, device=device)
    positions = torch.tensor([8, 4, 2], dtype=torch.int32, device=device)
    yield FORWARD, (q, kv, indices, None, None, 512, 0.1)
    yield FORWARD, (q, codes, indices, positions, torch.ones(2, device=device), 64, 0.1)
