"""Arguments to try each operator with: ``symmetric_mm``."""

from __future__ import annotations

import torch

from rtkernels.ops.gemm.symmetric_mm import SYMMETRIC_MM


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    a = torch.randn(2, 16, 24, generator=g, device=device).bfloat16()
    square = torch.ones(2, 16, 16, device=device, dtype=torch.bfloat16)
    yield SYMMETRIC_MM, (a, None, square, 0.5, 2.0, 1.0)
    yield SYMMETRIC_MM, (a.half().mT.contiguous().mT, None, None, 1.0, 0.0, 0.0)
    yield SYMMETRIC_MM, (square, square, None, 1.0, 0.0, 0.0)
