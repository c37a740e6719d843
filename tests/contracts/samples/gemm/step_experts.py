"""Arguments to try each operator with: ``step_experts``."""

from __future__ import annotations

import torch

from rtkernels.ops.gemm.step_experts import FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    shapes = ((2, 64), (4, 32, 64), (4, 64, 16), (64,))
    x, gate_up, down, norm = (torch.randn(*shape, generator=g, device=device).bfloat16() for shape in shapes)
    experts = torch.tensor([[0, 3], [3, 1]], dtype=torch.int32, device=device)
    probs = torch.rand(2, 2, generator=g, device=device)
    yield FORWARD, (x, gate_up, down, experts, probs, x.clone(), norm, "silu", True, 1e-6, 0.0)
    yield FORWARD, (x, gate_up, down, experts, probs, None, None, "gelu", False, 0.0, 0.0)
