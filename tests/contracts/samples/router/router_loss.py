"""Arguments to try each operator with: ``router_loss``."""

from __future__ import annotations

import torch

from rtkernels.ops.router.router_loss_plan import (
    BACKWARD,
    COUNTS,
    FORWARD,
    SIGMOID,
    SOFTMAX,
    Z,
    reference_counts,
)


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(4, 6, 16, generator=g, device=device)
    indices = torch.topk(x, 3).indices
    one = torch.ones((), device=device)
    counts = reference_counts(indices, 16, 1)
    yield COUNTS, (indices, 16, 1)
    yield COUNTS, (indices.int(), 16, -1)
    yield FORWARD, (x, None, Z, -1, 1, 0.1)
    yield FORWARD, (x.bfloat16(), counts, SIGMOID, 1, 3, 0.1)
    yield BACKWARD, (one, x, None, Z, -1, 1, 0.1)
    yield BACKWARD, (one, x.half(), counts, SOFTMAX, 1, 3, 0.1)
