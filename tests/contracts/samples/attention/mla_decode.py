"""Arguments to try each operator with: ``mla_decode``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.mla_decode import FORWARD


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q, cache = normal(2, 2, 3, 64), normal(2, 9, 64)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=device)
    yield FORWARD, (q, cache, lengths, None, 48, True, 0.25)
    yield FORWARD, (q, cache, lengths, table, 64, False, 0.25)
