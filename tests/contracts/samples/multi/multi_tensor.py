"""Arguments to try each operator with: ``multi_tensor``."""

from __future__ import annotations

import torch

from rtkernels.ops.multi import multi_adamw
from rtkernels.ops.multi.multi_tensor import CLIP, COPY, REDUCE, SCALE
from rtkernels.ops.multi.reference import LARGEST, SQUARES, ZEROS


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 50, generator=g, device=device)
    mixed = [x, x.bfloat16(), torch.zeros(0, device=device), x.half().t()]
    by = torch.full((), 0.5, device=device)
    yield REDUCE, (mixed, SQUARES, True, False)
    yield REDUCE, (mixed, LARGEST, False, True)
    yield REDUCE, (mixed, ZEROS, True, False)
    yield SCALE, ([t.clone() for t in mixed], by, 2.0, -1.0)
    yield SCALE, ([t.clone() for t in mixed], by, 1.0, 0.25)
    yield CLIP, ([t.clone() for t in mixed], SQUARES, 0.25)
    yield COPY, ([torch.empty_like(t, dtype=torch.bfloat16) for t in mixed], mixed, None, 1.0)
    yield from multi_adamw.samples(device)
