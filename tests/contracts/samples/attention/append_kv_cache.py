"""Arguments to try each operator with: ``append_kv_cache``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.append_kv_cache import APPEND


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)
    k = torch.randn(2, 3, 2, 16, generator=generator, device=device).bfloat16()
    angles = torch.rand(12, 4, generator=generator, device=device)
    lengths = torch.tensor([0, 4], dtype=torch.int32, device=device)
    slots = torch.tensor([[0, 1, -1], [5, 6, 7]], dtype=torch.int32, device=device)
    scale = torch.tensor([0.1, 0.2], device=device)
    nothing = (None,) * 7
    cache = torch.zeros(2, 8, 2, 16, dtype=k.dtype, device=device)
    yield APPEND, (k, k, cache, cache.clone(), lengths, *nothing, False)
    codes = torch.zeros(2, 8, 2, 16, dtype=torch.int8, device=device)
    rotation = angles.cos(), angles.sin()
    yield APPEND, (k, k, codes, codes.clone(), None, None, slots, slots.abs(), *rotation, scale, scale, True)
    plain, spread = torch.zeros(2, 8, 2, 16, device=device), torch.zeros(2, 2, 16, 8, device=device)
    yield APPEND, (k.float(), k.float(), plain, spread.permute(0, 3, 1, 2), None, None, slots, *nothing[:5], False)
