"""Arguments to try each operator with: ``row_dot``."""

from __future__ import annotations

import torch

from rtkernels.ops.reduce.row_dot import BACKWARD, FORWARD


def samples(device: str):
    x, y = torch.randn(2, 3, 5, 16, generator=torch.Generator(device).manual_seed(0), device=device)
    yield FORWARD, (x.bfloat16(), y.bfloat16())
    yield BACKWARD, (x[..., 0], x, y, True, True)
    yield BACKWARD, (x[..., 0], x, y, False, True)
