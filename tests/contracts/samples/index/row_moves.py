"""Arguments to try each operator with: ``row_moves``."""

from __future__ import annotations

import torch

from rtkernels.ops.index.id_bounds import BOUNDS
from rtkernels.ops.index.row_moves_operators import CHUNKS, SCATTER, SCATTER_INTO, SELECT, SELECT_INTO


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(12, 16, generator=g, device=device)
    scale = torch.rand(12, generator=g, device=device)
    indices = torch.randint(-1, 13, (9,), generator=g, device=device)
    yield SELECT, (x, indices, None)
    yield SELECT, (x.bfloat16(), indices.int(), scale)
    yield SELECT_INTO, (torch.zeros(9, 16, device=device), x, indices, None)
    yield SCATTER, (x[:9], indices, 10, None)
    yield SCATTER, (x[:9].bfloat16(), indices.int(), 10, scale[:9])
    yield SCATTER_INTO, (torch.ones(10, 16, device=device), x[:9].bfloat16(), indices, None, True)
    counts, order = torch.tensor([3, 0, 5, 2], device=device), torch.tensor([2, 3, 0, 1], device=device)
    yield CHUNKS, (x, counts, order, None, False)
    yield BOUNDS, (torch.tensor([2, 2, 5], device=device),)
    yield BOUNDS, (torch.arange(4100, device=device, dtype=torch.int32) // 3,)
    yield CHUNKS, (x.bfloat16(), counts.int(), order.int(), scale, True)
