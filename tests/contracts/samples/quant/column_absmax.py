"""Arguments to try each operator with: ``column_absmax``."""

from __future__ import annotations

import torch

from rtkernels.ops.quant.column_absmax import ABSMAX


def samples(device: str):
    x = torch.randn(3, 5, 16, generator=torch.Generator(device).manual_seed(0), device=device)
    yield ABSMAX, (x.bfloat16(), None, None)
    yield ABSMAX, (x, x[0, 0].new_ones(15), x[0, 0].abs())
