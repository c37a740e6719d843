"""Arguments to try each operator with: ``decode_linear``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.gemm.decode_linear import FORWARD

_WEIGHT = torch.full((24, 256), 0.01).bfloat16()
CALLS = {"decode_linear": lambda x, ids: rtkernels.decode_linear(x.detach().bfloat16(), _WEIGHT.to(x.device))}


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x, w, norm = (torch.randn(*shape, generator=g, device=device).bfloat16() for shape in ((2, 1, 64), (24, 64), (64,)))
    add, scale = torch.ones(2, 1, 24, dtype=x.dtype, device=device), torch.rand(24, generator=g, device=device)
    yield FORWARD, (x, w, None, None, add, norm, None, None, None, False, True, 1e-6, 1.0, 0.5)
    yield FORWARD, (x, w, scale, None, add, None, None, None, None, False, False, 0.0, 0.0, 1.0)
    codes = w.to(torch.float8_e4m3fn)
    yield FORWARD, (x, codes, scale, scale.clone(), None, None, None, None, "silu", True, False, 0.0, 0.0, 1.0)
