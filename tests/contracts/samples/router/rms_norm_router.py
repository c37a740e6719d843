"""Arguments to try each operator with: ``rms_norm_router``."""

from __future__ import annotations

import torch

from rtkernels.ops.router.rms_norm_router import FORWARD
from rtkernels.ops.router.router_gemm_kernels import FAST, HIGH


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device).bfloat16()
    weight = torch.randn(48, generator=g, device=device)
    router_weight = torch.randn(12, 48, generator=g, device=device)
    yield FORWARD, (x, weight, router_weight, 1e-6, 0.0, HIGH, False, "row")
    yield FORWARD, (x.half(), None, router_weight.half(), 1e-6, 0.0, FAST, True, "column")
