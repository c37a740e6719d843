"""Arguments to try each operator with: ``norm_modulated``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.norm_modulated import FORWARD


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)
    x, residual, y, h = torch.randn(4, 3, 16, generator=generator, device=device)
    row, scale = torch.ones(16, device=device), torch.ones(1, device=device)
    plain = (1e-6, 0.0, False, "none", False, 0.0, 0.0)
    yield (
        FORWARD,
        (x, residual, x.clone(), row, None, None, row.view(1, 16), None, None, None, y, h, None, None, None, *plain),
    )
    codes = torch.zeros(3, 16, dtype=torch.float8_e4m3fn, device=device)
    tensor = (1e-5, 1.0, True, "tensor", False, 0.0, 1e-12)
    yield (
        FORWARD,
        (x, None, None, None, row, row.clone(), None, None, None, scale, codes, None, y.clone(), None, None, *tensor),
    )
