"""Arguments to try each operator with: ``layer_norm``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.layer_norm import ADD_FORWARD, BACKWARD, BACKWARD_OVER, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    weight, bias = torch.randn(2, 48, generator=g, device=device).unbind()
    yield FORWARD, (x, weight, bias, 1e-5, 0.0)
    yield FORWARD, (x.bfloat16(), None, None, 1e-5, 0.0)
    yield FORWARD, (x.half(), None, bias, 1e-5, 0.0)
    yield ADD_FORWARD, (x, x * 2, weight, bias, 1e-5, 1.0)
    yield BACKWARD, (x * 3, x, weight, bias, None, 1e-5, 0.0, True)
    yield BACKWARD, (x * 3, x, weight, None, x, 1e-5, 0.0, True)
    yield BACKWARD, (x * 3, x, None, None, None, 1e-5, 0.0, False)
    yield BACKWARD_OVER, (x * 3, x.clone(), weight, bias, x * 2, 1e-5, 0.0, True)
