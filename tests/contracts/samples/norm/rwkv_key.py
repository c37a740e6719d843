"""Samples and calls of ``rwkv_key``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.norm.rwkv_key import FORWARD


def _call(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = torch.linspace(-1.0, 1.0, 256, dtype=x.dtype, device=x.device)
    return rtkernels.rwkv_key(x.detach(), weight, x.detach(), weight, 4)


CALLS = {"rwkv_key": _call}


def samples(device: str):
    k, a = torch.randn(2, 3, 24, device=device)
    kk, ka = torch.randn(2, 24, device=device)
    yield FORWARD, (k, kk, a, ka, 3)
    yield FORWARD, (*(t.bfloat16() for t in (k, kk, a, ka)), 8)
