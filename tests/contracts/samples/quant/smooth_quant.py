"""Arguments to try each operator with: ``smooth_quant``."""

from __future__ import annotations

import torch

from rtkernels.ops.quant import quantize_fp8_channel as channel
from rtkernels.ops.quant.smooth_quant import SMOOTH
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES


def samples(device: str):
    x = torch.randn(3, 5, 16, generator=torch.Generator(device).manual_seed(0), device=device)
    smooth, e4m3, e5m2 = x[0, 0].abs() + 0.5, *FP8_DTYPES
    yield SMOOTH, (x, smooth, None, e4m3, False, True)
    experts = torch.ones(15, dtype=torch.int32, device=device)
    yield SMOOTH, (x, torch.stack([smooth, smooth]), experts, e5m2, True, False)
    yield channel.CHANNEL, (x.bfloat16(), None, None, e4m3, False, 1)
    yield channel.CHANNEL, (x, x[:, :, 0].reshape(-1), smooth, e4m3, True, 32)
