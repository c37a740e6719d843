"""Arguments to try each operator with: ``norm_modulated_bwd``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.norm_modulated_bwd import BACKWARD


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)
    dy, h, dsum, x, gate, scale = torch.randn(6, 3, 16, generator=generator, device=device)
    results = torch.zeros(5, 3, 16, device=device).unbind()
    row = torch.ones(16, device=device)
    yield (BACKWARD, (dy, h, dsum, x, gate, row, None, None, scale, row.clone(), *results, 1e-6, 0.0, False))
    dh, *_ = torch.zeros(2, 3, 16, device=device)
    yield (
        BACKWARD,
        (dy, h, None, None, None, None, row, row.clone(), None, None, dh, None, None, None, None, 1e-5, 1.0, True),
    )
