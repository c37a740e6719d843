"""Arguments to try each operator with: ``moe_permute_fp8``."""

from __future__ import annotations

import torch

from rtkernels.ops.moe.moe_index_layout import build
from rtkernels.ops.moe.moe_permute_fp8 import QUANTIZE
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    choices = torch.stack([torch.randperm(5, generator=g, device=device)[:3] for _ in range(70)])
    index = build(choices, 5, 16, 320)
    x, probs = torch.randn(70, 136, generator=g, device=device), torch.rand(70, 3, generator=g, device=device)
    parts = index.rows, index.slots, index.offsets
    yield QUANTIZE, (x.bfloat16(), *parts, probs, None, "both", FP8_DTYPES[0], False)
    yield QUANTIZE, (x, *parts, None, None, "row", FP8_DTYPES[1], True)
    yield QUANTIZE, (x.half(), *parts, x[:, :5].contiguous(), index.experts, "transposed", FP8_DTYPES[0], True)
