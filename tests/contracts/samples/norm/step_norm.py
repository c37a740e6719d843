"""Arguments to try each operator with: ``step_norm``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.step_norm import FORWARD


def samples(device: str):
    x, residual = torch.randn(2, 3, 1, 64, generator=torch.Generator(device).manual_seed(0), device=device).bfloat16()
    yield FORWARD, (x, torch.ones(64, dtype=x.dtype, device=device), residual, 1e-6, 1.0)
