"""Arguments to try each operator with: ``inplace``."""

from __future__ import annotations

import torch

from rtkernels.ops.pointwise.inplace import ADD


def samples(device: str):
    x, y = torch.randn(2, 3, 8, generator=torch.Generator(device).manual_seed(0), device=device)
    yield ADD, (x, y, None, 0.5, 1.0)
    yield ADD, (x.bfloat16(), None, torch.tensor(0.5, device=device), 0.0, 1.0)
