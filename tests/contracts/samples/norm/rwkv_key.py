"""Samples and calls of ``rwkv_key``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.norm.rwkv_key import FORWARD

CALLS = {"rwkv_key": lambda x, ids: rtkernels.rwkv_key(x, x.sum(0), x, x.sum(0), 4)}


def samples(device: str):
    k, a = torch.randn(2, 3, 24, device=device)
    kk, ka = torch.randn(2, 24, device=device)
    yield FORWARD, (k, kk, a, ka, 3)
    yield FORWARD, (*(t.bfloat16() for t in (k, kk, a, ka)), 8)
