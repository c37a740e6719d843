"""Samples and calls of ``group_norm``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.reduce.group_norm import BACKWARD, FORWARD

CALLS = {"group_norm": lambda x, ids: rtkernels.group_norm(x, groups=8)}


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)
    x, dy = torch.randn(2, 2, 8, 3, 4, generator=generator, device=device).bfloat16()
    weight, bias = torch.randn(2, 8, generator=generator, device=device)
    yield FORWARD, (x, weight, bias, 4, 1e-5, True)
    yield FORWARD, (x[..., 0], None, None, 2, 1e-5, False)
    mean, rstd = torch.zeros(2, 4, device=device), torch.ones(2, 4, device=device)
    yield BACKWARD, (dy, x, weight, bias, mean, rstd, 4, True, True, True, True)
    yield BACKWARD, (dy, x, weight, None, mean, rstd, 4, False, False, True, False)
