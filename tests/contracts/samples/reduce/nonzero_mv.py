"""Samples and calls of ``nonzero_mv``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.reduce.nonzero_mv import FORWARD

CALLS = {"nonzero_mv": lambda x, ids: rtkernels.nonzero_mv(x.detach()[:, 0].contiguous().relu(), x.detach())}


def samples(device: str):
    k, v = torch.randn(70, device=device).relu(), torch.randn(70, 16, device=device)
    yield FORWARD, (k, v)
    yield FORWARD, (k.bfloat16(), v[:, :5].bfloat16())
