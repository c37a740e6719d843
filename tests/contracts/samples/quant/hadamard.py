"""Arguments to try each operator with: ``hadamard``."""

from __future__ import annotations

import torch

from rtkernels.ops.quant.hadamard import QUANTIZE, TRANSFORM


def samples(device: str):
    x = torch.randn(3, 5, 64, generator=torch.Generator(device).manual_seed(0), device=device)
    yield TRANSFORM, (x, 32, torch.float32)
    yield TRANSFORM, (x.bfloat16(), 64, torch.float32)
    yield QUANTIZE, (x, 64, torch.float8_e4m3fn, False)
