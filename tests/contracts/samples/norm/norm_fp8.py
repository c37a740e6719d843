"""Arguments to try each operator with: ``norm_fp8``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.norm_fp8_operators import FORWARD, SMOOTH


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 136, generator=g, device=device)
    weight = torch.randn(136, generator=g, device=device)
    half, rstd = x.bfloat16(), x[..., 0].abs().contiguous()
    yield FORWARD, (x, weight, None, None, None, None, 1e-6, 0.0, "row", False, "column", False, False)
    yield FORWARD, (half, weight, None, half, None, None, 1e-6, 1.0, "both", True, "row", True, False)
    yield FORWARD, (x, None, None, None, rstd, None, 1e-6, 0.0, "transposed", False, "row", False, False)
    yield FORWARD, (x, weight, weight, None, None, None, 1e-6, 0.0, "none", False, "row", True, True)
    yield SMOOTH, (x, weight.abs(), weight, None, None, 1e-6, 0.0, False, False, True, False)
    yield SMOOTH, (half, weight.abs(), weight, weight, half, 1e-6, 0.0, True, True, False, True)
