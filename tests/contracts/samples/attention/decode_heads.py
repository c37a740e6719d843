"""Arguments to try each operator with: ``decode_heads``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.decode_heads import HEADS


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(2, 6 * 16, generator=g, device=device).bfloat16()
    weight, angles = torch.ones(16, dtype=qkv.dtype, device=device), torch.rand(2, 8, generator=g, device=device)
    slots = torch.tensor([3, 0], dtype=torch.int32, device=device)
    cache = torch.zeros(2, 4, 1, 16, dtype=qkv.dtype, device=device)
    tables = angles.cos(), angles.sin()
    yield HEADS, (qkv, weight, weight.clone(), *tables, slots, cache, cache.clone(), 16, False, 1e-6, 0.0)
    yield HEADS, (qkv, None, None, *tables, slots, cache, cache.clone(), 16, True, 0.0, 0.0)
