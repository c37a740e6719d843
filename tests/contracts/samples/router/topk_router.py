"""Arguments to try each operator with: ``topk_router``."""

from __future__ import annotations

import torch

from rtkernels.ops.router.topk_router import BACKWARD, FORWARD
from rtkernels.ops.router.topk_router_plan import RENORMALIZE, SCORE_FIRST, SOFTMAX


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    indices = torch.topk(x, 4).indices.int()
    yield FORWARD, (x, x[0, 0].contiguous(), 4, SCORE_FIRST | RENORMALIZE, 6, 2, 2, 2.5, 1e-20, True, True)
    yield FORWARD, (x.bfloat16(), None, 7, SOFTMAX, 1, 1, 1, 1.0, 1e-20, False, False)
    yield BACKWARD, (x, indices, x[..., :4].contiguous(), x, SCORE_FIRST | RENORMALIZE, 2.5, 1e-20)
    yield BACKWARD, (x.half(), indices, x[..., :4].contiguous(), None, SOFTMAX | SCORE_FIRST, 1.0, 1e-20)
