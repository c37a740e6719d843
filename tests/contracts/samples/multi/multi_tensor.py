"""Arguments to try each operator with: ``multi_tensor``."""

from __future__ import annotations

import torch

from rtkernels.ops.multi.multi_adamw import STEP
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
    yield from adamw_samples(device)


def adamw_samples(device: str):
    """Arguments for one step of AdamW."""
    g = torch.Generator(device).manual_seed(1)

    def some() -> list[torch.Tensor]:
        return [torch.randn(size, generator=g, device=device).abs() for size in (40, 3)]

    def step() -> list[torch.Tensor]:
        return [torch.full((), 2.0, device=device) for _ in range(2)]

    numbers = (1e-2, 0.9, 0.99, 1e-8, 0.1, False)
    yield STEP, (some(), some(), some(), some(), step(), [], None, None, None, *numbers)
    copies = [t.bfloat16() for t in some()]
    one = torch.ones((), device=device)
    low = [t.bfloat16() for t in some()]
    yield STEP, (some(), low, some(), some(), step(), copies, one * 0.1, one * 4, one * 0, *numbers)
