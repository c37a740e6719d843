"""Arguments to try each operator with: ``step_attention``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.step_attention import FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(2, 6 * 64, generator=g, device=device).bfloat16()
    weight, angles = torch.ones(64, dtype=qkv.dtype, device=device), torch.rand(2, 32, generator=g, device=device)
    slots, lengths = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([3, 0], [4, 1]))
    cache = torch.zeros(2, 4, 1, 64, dtype=qkv.dtype, device=device)
    tables = angles.cos(), angles.sin()
    numbers = 1e-6, 0.0, 0.125, 0.0
    given = (weight, weight.clone(), *tables, None, slots, lengths, None, cache, cache.clone(), 64, False, True)
    yield FORWARD, (qkv, *given, *numbers)
    sinks = torch.zeros(4, device=device)
    places = torch.tensor([1, 0], device=device)
    given = (None, None, *tables, places, slots, lengths, sinks, cache.clone(), cache.clone(), 64, True, False)
    yield FORWARD, (qkv, *given, *numbers)
