"""Samples of ``block_sum``."""

from __future__ import annotations

import torch

from rtkernels.ops.shared.block_sum import BLOCK_SUM


def samples(device: str):
    dy, x = torch.randn(2, 3, 40, 8, device=device)
    total = torch.randn(8, device=device)
    yield BLOCK_SUM, (total, dy, None, 0.0, False, 128)
    yield BLOCK_SUM, (total, dy, x, 1e-6, False, 16)
    yield BLOCK_SUM, (total, dy[..., :8], x, 1e-5, True, 128)
