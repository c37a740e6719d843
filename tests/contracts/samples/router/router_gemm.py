"""Arguments to try each operator with: ``router_gemm``."""

from __future__ import annotations

import torch

from rtkernels.ops.router.router_gemm import BACKWARD, BACKWARD_INTO, FORWARD
from rtkernels.ops.router.router_gemm_kernels import EXACT, FAST, HIGH


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device).bfloat16()
    weight = torch.randn(12, 48, generator=g, device=device)
    dy = torch.randn(3, 5, 12, generator=g, device=device)
    yield FORWARD, (x, weight, None, HIGH)
    yield FORWARD, (x.half(), weight.bfloat16(), torch.ones(12, device=device), EXACT)
    yield BACKWARD, (dy, x, weight, HIGH, True, True)
    yield BACKWARD, (dy, x, weight.bfloat16(), FAST, False, True)
    yield BACKWARD_INTO, (torch.zeros(12, 48, device=device), dy, x, HIGH)
