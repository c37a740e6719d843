"""Arguments to try each operator with: ``group_rms_norm_gate``."""

from __future__ import annotations

import torch

from rtkernels.ops.norm.group_rms_norm_gate import BACKWARD, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    gate, weight = x.flip(-1) * 2, torch.randn(48, generator=g, device=device)
    turned = gate.transpose(0, 1).contiguous()
    yield FORWARD, (x, gate, weight, 3, 1e-6, "same", "sigmoid", False)
    yield (
        FORWARD,
        (x.bfloat16().view(3, 5, 6, 8), turned.bfloat16(), weight[:16], 3, 1e-6, "sequence_first", "silu", True),
    )
    yield BACKWARD, (gate * 3, x, gate, weight, 3, 1e-6, "same", "silu", False, True)
    yield BACKWARD, (turned * 3, x, turned, weight[:24], 2, 1e-6, "sequence_first", "silu", True, True)
    yield BACKWARD, (gate * 3, x, gate, None, 1, 1e-6, "same", "sigmoid", False, False)
