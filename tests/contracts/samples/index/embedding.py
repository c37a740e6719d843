"""Arguments to try each operator with: ``embedding``."""

from __future__ import annotations

import torch

from rtkernels.ops.index.embedding import ADD, BACKWARD, FORWARD, NO_PADDING


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    weight = torch.randn(20, 16, generator=g, device=device)
    ids = torch.randint(0, 24, (3, 5), generator=g, device=device)
    dy = torch.randn(3, 5, 16, generator=g, device=device)
    yield FORWARD, (weight, ids, 0)
    yield FORWARD, (weight.bfloat16(), ids.int(), 3)
    yield BACKWARD, (dy, ids, 20, 0, NO_PADDING)
    yield BACKWARD, (dy.bfloat16(), ids.int(), 20, 3, 5)
    yield ADD, (weight.clone(), dy.bfloat16(), ids, 0, 4)
