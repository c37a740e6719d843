"""Arguments to try each operator with: ``moe_permute``."""

from __future__ import annotations

import torch

from rtkernels.ops.moe.moe_index_layout import build
from rtkernels.ops.moe.moe_permute import PERMUTE, PROBS, UNPERMUTE, UNPERMUTE_BWD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    choices = torch.stack([torch.randperm(5, generator=g, device=device)[:3] for _ in range(6)])
    choices[1, 2] = -1
    index = build(choices, 5, 4, 40)
    x, probs = torch.randn(6, 16, generator=g, device=device), torch.rand(6, 3, generator=g, device=device)
    every = torch.rand(6, 5, generator=g, device=device)
    rows, slots, experts = index.rows, index.slots, index.experts
    yield PERMUTE, (x, rows, slots, None, None, None)
    yield PERMUTE, (x.bfloat16(), rows, slots, x[:, :2], probs.half(), None)
    yield PERMUTE, (x.half(), rows, slots, x[:, 0], every, experts)
    y = torch.randn(40, 16, generator=g, device=device)
    yield UNPERMUTE, (y, rows, None, None, y[:, 0].bfloat16())
    yield UNPERMUTE, (y.half(), rows, every, experts, None)
    yield UNPERMUTE_BWD, (x, y, rows, slots, probs, None, True)
    yield UNPERMUTE_BWD, (x, None, rows, slots, every, experts, True)
    yield PROBS, (y[:, 0].contiguous(), rows, experts, 5)
    yield PROBS, (probs, None, experts, 5)
