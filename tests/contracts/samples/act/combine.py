"""Arguments to try each operator with: ``combine``."""

from __future__ import annotations

import torch

from rtkernels.ops.act.combine import COMBINE


def samples(device: str):
    x, up, base, y = torch.randn(4, 3, 16, generator=torch.Generator(device).manual_seed(0), device=device)
    row, dt = torch.ones(1, 16, device=device), torch.ones(1, device=device)
    plain = ("plain", "", "none", False, 0.0, 0.0, 0.5)
    yield COMBINE, (x, row, None, up, None, base, None, None, dt, y, None, None, None, "silu", False, False, *plain)
    codes, scale = torch.zeros(3, 8, dtype=torch.int8, device=device), torch.zeros(3, device=device)
    rows = ("concat", "", "row", False, 0.0, 1e-12, 1.0)
    nothing = (None,) * 8
    yield COMBINE, (x, *nothing, codes, None, scale, None, "gelu_erf", False, False, *rows)
