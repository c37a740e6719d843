"""Arguments to try each operator with: ``strided_copy``."""

from __future__ import annotations

import torch

from rtkernels.ops.layout.strided_copy import COPY


def samples(device: str):
    x = torch.randn(2, 3, 4, generator=torch.Generator(device).manual_seed(0), device=device)
    yield COPY, (x.transpose(0, 1), torch.zeros(3, 2, 4, device=device), None, False)
    yield COPY, (x, torch.zeros(3, 4, device=device), None, True)
    pixels, table = torch.ones(2, 3, dtype=torch.uint8, device=device), torch.ones(256, device=device)
    yield COPY, (pixels, torch.zeros(2, 3, device=device), table, False)
