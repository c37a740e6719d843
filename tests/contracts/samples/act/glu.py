"""Arguments to try each operator with: ``glu``."""

from __future__ import annotations

import torch

from rtkernels.ops.act.glu import BACKWARD, BACKWARD_OVER, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    up, dy, weight = x.flip(-1) * 2, x * 3, x[..., 0].contiguous()
    yield FORWARD, (x, None, None, "silu")
    yield FORWARD, (x.bfloat16(), up.bfloat16(), weight, "gelu_tanh")
    yield FORWARD, (x, None, None, "silu:1.5")
    yield BACKWARD, (dy[..., :24], x, None, None, "silu", False)
    yield BACKWARD, (dy, x, up, weight, "swiglu_oai:0.5", True)
    yield BACKWARD, (dy, x, up, weight, "gelu_erf", True)
    yield BACKWARD, (dy[..., :24].half(), x.half(), None, weight.half(), "relu2", True)
    yield BACKWARD_OVER, (dy[..., :24], x.clone(), None, None, "silu", False)
    yield BACKWARD_OVER, (dy, x.clone(), up.clone(), weight, "gelu_erf", True)
