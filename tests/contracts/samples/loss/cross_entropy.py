"""Arguments to try each operator with: ``cross_entropy``."""

from __future__ import annotations

import torch

from rtkernels.ops.loss import cross_entropy_soft as soft
from rtkernels.ops.loss.cross_entropy_operators import (
    BACKWARD,
    BACKWARD_IN_PLACE,
    FORWARD,
    ONE_PASS,
    ONE_PASS_IN_PLACE,
    PARTS,
    SCALE,
)
from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE, SUM


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 4, 40, generator=g, device=device)
    labels = torch.arange(12, device=device).view(3, 4) * 3
    labels[1, 2] = -100
    _, _, stats, factor = FORWARD(x, labels, -100, 0.1, 1e-3, 0.0, MEAN, True)
    one = torch.ones((), device=device)
    yield FORWARD, (x, labels, -100, 0.1, 1e-3, 0.0, MEAN, True)
    yield FORWARD, (x.bfloat16(), labels.int(), -100, 0.0, 0.0, 5.0, NONE, False)
    yield PARTS, (x, labels, -100, 0.1, 0.0, 20, 80)
    yield BACKWARD, (one, x, labels, stats, factor, -100, 0.1, 1e-3, 0.0, 0, 40)
    yield BACKWARD, (torch.ones(3, 4, device=device), x.half(), labels, stats, None, -100, 0.0, 0.0, 5.0, 0, 40)
    yield BACKWARD_IN_PLACE, (one, x.clone(), labels, stats, None, -100, 0.0, 0.0, 0.0, 0, 40)
    yield ONE_PASS, (x, labels, -100, 0.1, 1e-3, 0.0, MEAN, True)
    yield ONE_PASS, (x.bfloat16(), labels, -100, 0.0, 0.0, 5.0, SUM, False)
    yield ONE_PASS_IN_PLACE, (x.clone(), labels, -100, 0.0, 0.0, 0.0, NONE, False)
    yield SCALE, (x.clone(), one * 2)
    yield SCALE, (x.clone(), torch.rand(3, 4, device=device))
    weight, target = torch.rand(40, generator=g, device=device), x.softmax(-1)
    _, stats = soft.FORWARD(x, target, None, weight, -100, 0.1, 0.0)
    rows = torch.ones(3, 4, device=device)
    yield soft.FORWARD, (x, target, None, weight, -100, 0.1, 0.0)
    yield soft.FORWARD, (x.bfloat16(), None, labels, weight, -100, 0.1, 5.0)
    yield soft.BACKWARD, (rows, x, target, None, weight, stats, -100, 0.1, 0.0)
    yield soft.BACKWARD, (rows, x.half(), None, labels, None, stats, -100, 0.1, 0.0)
