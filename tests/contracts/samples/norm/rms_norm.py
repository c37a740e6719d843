"""Arguments to try each operator with: ``rms_norm``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.rms_norm import ADD_FORWARD, BACKWARD, BACKWARD_OVER, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    weight = torch.randn(48, generator=g, device=device)
    yield FORWARD, (x, weight, 1e-6, 0.0)
    yield FORWARD, (x.bfloat16(), None, 1e-6, 0.0)
    yield ADD_FORWARD, (x, x * 2, weight, 1e-6, 1.0)
    yield BACKWARD, (x * 3, x, weight, None, 1e-6, 0.0, True)
    yield BACKWARD, (x * 3, x, weight, x, 1e-6, 0.0, True)
    yield BACKWARD, (x * 3, x, None, None, 1e-6, 0.0, False)
    yield BACKWARD_OVER, (x * 3, x.clone(), weight, x * 2, 1e-6, 0.0, True)
