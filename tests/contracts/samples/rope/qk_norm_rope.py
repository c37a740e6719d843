"""Arguments to try each operator with: ``qk_norm_rope``."""

from __future__ import annotations

import torch

from rtkernels.ops.rope.qk_norm_rope import BACKWARD, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(5, 2, 8 * 32, generator=g, device=device)
    weights = torch.randn(2, 32, generator=g, device=device)
    angle = torch.randn(5, 16, generator=g, device=device)
    angles = (angle.cos(), angle.sin(), None, None, "", 0, 1, 1.0)
    for silu in (False, True):
        options = (4, 2, True, "sbhd", 0, 0, silu, 1e-6, 0.0)
        yield FORWARD, (qkv, weights[0].clone(), weights[1].clone(), *options, *angles)
        d = [torch.randn(2, 5, h, 32, generator=g, device=device) for h in (4, 2, 2)]
        yield BACKWARD, (*d, qkv, weights[0].clone(), weights[1].clone(), *options, True, *angles)
        yield BACKWARD, (*d, qkv, None, None, *options, False, *angles)
