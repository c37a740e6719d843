"""Arguments to try each operator with: ``qkv_split``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.qkv_split import SPLIT


def samples(device: str):
    qkv = torch.randn(2, 3, 32, generator=torch.Generator(device).manual_seed(0), device=device)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    nothing = (None,) * 5
    yield SPLIT, (qkv, *nothing, zeros(2, 3, 2, 8), zeros(2, 3, 1, 8), zeros(2, 3, 1, 8), 2, 1, False, False, 1e-6, 0)
    weight, angles = torch.ones(8, device=device), torch.rand(12, 4, device=device)
    pos = torch.tensor([0, 4], dtype=torch.int32, device=device)
    given = weight, weight.clone(), angles.cos(), angles.sin(), pos
    yield SPLIT, (qkv, *given, zeros(2, 3, 2, 8), zeros(2, 6, 1, 8), zeros(2, 6, 1, 8), 2, 1, True, True, 1e-6, 1)
