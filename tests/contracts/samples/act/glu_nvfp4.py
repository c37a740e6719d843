"""Arguments to try each operator with: ``glu_nvfp4``."""

from __future__ import annotations

import torch

from rtkernels.ops.act.glu_nvfp4 import GLU


def samples(device: str):
    codes = torch.arange(3 * 16, dtype=torch.uint8, device=device).view(3, 16) * 5
    scales, number = torch.ones(3, 2, device=device).to(torch.float8_e4m3fn), torch.ones(1, device=device)
    y, factors = torch.zeros(3, 32, device=device), torch.ones(32, device=device)
    pair = (codes, scales, number)
    yield GLU, (*pair, *pair, factors, None, y, None, None, None, "silu", "none", False, 0.0, 0.0)
    result = torch.zeros_like(codes), None, torch.zeros_like(scales), torch.zeros((), device=device)
    yield GLU, (*pair, *pair, None, None, *result, "gelu_tanh", "nvfp4", False, 0.0, 0.0)
