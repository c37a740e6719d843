"""Arguments to try each operator with: ``decode``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.decode import FORWARD


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q, k, v = normal(2, 1, 4, 16), normal(2, 9, 2, 16), normal(2, 9, 2, 32)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=device)
    scale = torch.tensor([0.5, 0.25], device=device)
    yield FORWARD, (q, k, v, lengths, None, None, None, None, 0.25, -1, 0, 0.0)
    codes = (16 * k).to(torch.int8), (16 * v).to(torch.int8)
    yield FORWARD, (q, *codes, lengths, table, scale, scale, torch.ones(4, device=device), 0.25, 5, 0, 2.0)
