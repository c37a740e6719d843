"""Arguments to try each operator with: ``merge``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.merge import BACKWARD, FORWARD


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(2, 3, 2, 8, generator=generator, device=device) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 2, 3, generator=generator, device=device) for _ in range(2))
    yield FORWARD, (a.bfloat16(), lse_a, b.bfloat16(), lse_b, False)
    yield FORWARD, (a, lse_a, b.bfloat16(), lse_b, True)
    yield BACKWARD, (a, None, a, lse_a, b.bfloat16(), lse_b)
    yield BACKWARD, (a.bfloat16(), lse_b, a.bfloat16(), lse_a, b, lse_b)
