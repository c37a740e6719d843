"""Arguments to try each operator with: ``linear_cross_entropy``."""

from __future__ import annotations

import torch

from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE, SUM
from rtkernels.ops.loss.linear_cross_entropy_operators import BACKWARD, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=g, device=device)
    weight = torch.randn(24, 8, generator=g, device=device)
    labels, bias = torch.arange(10, device=device).view(2, 5), torch.randn(24, generator=g, device=device)
    options = (-100, 0.1, 1e-3, 0.0)
    yield FORWARD, (hidden, weight, labels, bias, *options, MEAN, True, True, 4, False, True, True, True)
    yield FORWARD, (hidden, weight, labels, None, *options, SUM, False, False, 4, True, False, True, False)
    yield FORWARD, (hidden, weight, labels, None, *options, NONE, True, False, 16, False, False, False, False)
    yield (
        BACKWARD,
        (torch.rand(2, 5, device=device), hidden, weight, labels, bias, *options, 4, False, True, True, True),
    )
