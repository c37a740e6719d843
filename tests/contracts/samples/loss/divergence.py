"""Arguments to try each operator with: ``divergence``."""

from __future__ import annotations

import torch

from rtkernels.ops.loss.divergence_operators import BACKWARD, BOTH, EACH, FORWARD
from rtkernels.ops.loss.divergence_plan import (
    BY_ELEMENTS,
    BY_FIRST,
    BY_NOTHING,
    BY_ROWS,
    LOGARITHM,
    MIXED,
    PROBABILITY,
    REVERSE,
)


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x, t = torch.randn(2, 3, 5, 16, generator=g, device=device).log_softmax(-1)
    labels = torch.arange(15, device=device).view(3, 5) % 4
    total, one = torch.tensor([1.0, 0.5], device=device), torch.tensor(2.0, device=device)
    yield FORWARD, (x, t, None, -100, LOGARITHM, 0.0, 0.1, BY_NOTHING)
    yield FORWARD, (x.bfloat16(), t.bfloat16(), labels, 2, MIXED, 0.5, 1.0, BY_ROWS)
    yield BOTH, (x, t, labels, 2, REVERSE, 1.0, 1.0, BY_ELEMENTS)
    yield BOTH, (x.bfloat16(), t.bfloat16(), None, -100, MIXED, 0.5, 0.1, BY_FIRST)
    yield EACH, (x, t.exp(), labels, 2, PROBABILITY, 0.0)
    yield BACKWARD, (one, x, t, labels, total, 2, REVERSE, 1.0, False)
    yield BACKWARD, (x, x, t, None, None, -100, MIXED, 0.3, True)
