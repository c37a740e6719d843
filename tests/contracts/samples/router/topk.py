"""Arguments to try each operator with: ``topk``."""

from __future__ import annotations

import torch

from rtkernels.ops.router.topk import BACKWARD, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    yield FORWARD, (x, 4, True)
    yield FORWARD, (x.bfloat16(), 7, False)
    yield BACKWARD, (x[..., :3].contiguous(), torch.topk(x, 3).indices, 48)
