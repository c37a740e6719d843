"""Arguments to try each operator with: ``transpose``."""

from __future__ import annotations

import torch

from rtkernels.ops.layout.transpose import EXPERTS, MATRICES, TRANSPOSE


def samples(device: str):
    x = torch.randn(3, 5, 2, 16, generator=torch.Generator(device).manual_seed(0), device=device)
    yield TRANSPOSE, (x, 1, 2, 1)
    yield TRANSPOSE, (x.bfloat16(), 1, -1, 32)
    yield TRANSPOSE, (x[0, 0].to(torch.uint8), 0, 1, 1)
    yield EXPERTS, (x[0, :, 0], torch.tensor([2, 0, 3], device=device), 4)
    yield MATRICES, ([x[0, 0].clone(), x[0, 1].clone()], 4)
