"""Arguments to try each operator with: ``rope``."""

from __future__ import annotations

import torch

from rtkernels.ops.rope import mla_rope as mla
from rtkernels.ops.rope.rope_operators import FORWARD, IN_PLACE
from rtkernels.ops.rope.rope_table import TABLE


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(2, 5, 4, 32, generator=g, device=device)
    k = torch.randn(2, 5, 2, 32, generator=g, device=device)
    angle = torch.randn(5, 16, generator=g, device=device)
    cos, sin = angle.cos(), angle.sin()
    plain = (None, None, "", 0, 1, 1.0)
    yield FORWARD, (q, k, "bshd", "bshd", 0, 0, 0, False, cos, sin, *plain)
    yield FORWARD, (q.bfloat16(), None, "bshd", "sbhd", 0, 16, 1, True, cos[:, :8], sin[:, :8], *plain)
    yield IN_PLACE, (q.clone(), k.clone(), "bshd", 0, 0, 0, False, cos, sin, *plain)
    yield IN_PLACE, (q.clone(), None, "bshd", 0, 0, 1, False, cos, sin, *plain)
    yield TABLE, (angle[0].double(), None, 5, 1.0, 1.0, torch.float32)
    yield TABLE, (angle[0].double(), angle[:, 0].double(), 5, 0.5, 1.25, torch.bfloat16)
    yield from _mla_samples(device)


def _mla_samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    kv = torch.randn(5, 2, 3, 40, generator=g, device=device)
    k_pos = torch.randn(5, 2, 1, 16, generator=g, device=device)
    angle = torch.randn(5, 8, generator=g, device=device)
    angles = (angle.cos(), angle.sin(), None, None, "", 0, 1, 1.0)
    yield mla.KV_FORWARD, (kv, k_pos, 24, "sbhd", "sbhd", 2, *angles)
    yield mla.KV_FORWARD, (kv.bfloat16(), k_pos.squeeze(2).bfloat16(), 24, "sbhd", "bshd", 2, *angles)
    dk, dv = torch.randn(5, 2, 3, 40, generator=g, device=device), torch.randn(5, 2, 3, 16, generator=g, device=device)
    yield mla.KV_BACKWARD, (dk, dv, 24, "sbhd", "sbhd", 2, 4, *angles)
    yield mla.KV_BACKWARD, (dk, dv, 24, "bshd", "sbhd", 0, 3, *angles[:2], *angles[2:])
