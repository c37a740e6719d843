"""Arguments to try each operator with: ``fp8_linear_smooth``."""

from __future__ import annotations

import torch

from rtkernels.ops.gemm.fp8_linear_smooth import SMOOTH_OPERAND


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x, factor = torch.randn(20, 50, generator=g, device=device), torch.rand(50, generator=g, device=device)
    yield SMOOTH_OPERAND, (x, factor, torch.float8_e4m3fn, False, False, False)
    yield SMOOTH_OPERAND, (x, factor, torch.float8_e4m3fn, True, True, True)
    yield SMOOTH_OPERAND, (x[:, :48], factor[:48], torch.float8_e4m3fn, False, True, True)
