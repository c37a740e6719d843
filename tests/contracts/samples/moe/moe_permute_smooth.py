"""Arguments to try each operator with: ``moe_permute_smooth``."""

from __future__ import annotations

import torch

from rtkernels.ops.moe import moe_permute_smooth_t as transposed
from rtkernels.ops.moe.moe_index_layout import build
from rtkernels.ops.moe.moe_permute_smooth import SMOOTH
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    choices = torch.stack([torch.randperm(5, generator=g, device=device)[:3] for _ in range(7)])
    index = build(choices, 5, 4, 40)
    x, smooth = torch.randn(7, 32, generator=g, device=device), torch.rand(5, 32, generator=g, device=device)
    parts, e4m3, e5m2 = (index.rows, index.slots, index.experts), *FP8_DTYPES
    other = torch.randn(40, 32, generator=g, device=device)
    yield SMOOTH, (x, *parts, smooth, x[:, 0].contiguous(), other, e4m3, False)
    yield SMOOTH, (x.bfloat16(), *parts, smooth, x[:, :4].contiguous(), None, e5m2, True)
    yield from _transposed_samples(x, index, smooth[0], other[:, 0].contiguous())


def _transposed_samples(x, index, smooth, row_factor):
    parts = index.rows, index.slots, index.offsets
    yield transposed.CHANNEL, (x, *parts, row_factor, x[:, 0].contiguous(), smooth, False)
    yield transposed.CHANNEL, (x.bfloat16(), *parts, None, None, None, True)
