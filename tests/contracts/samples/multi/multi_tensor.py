"""Arguments to try each operator with: ``multi_tensor``."""

from __future__ import annotations

import torch

from rtkernels.ops.multi import dynamic_codes, multi_adamw_codes, multi_lion
from rtkernels.ops.multi.multi_adamw import STEP
from rtkernels.ops.multi.multi_muon import APPLY, MOMENTUM
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
    yield from codes_samples(device)
    yield from lion_samples(device)
    yield from muon_samples(device)


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


def codes_samples(device: str):
    """Arguments for one step of AdamW with moments of 32, 8 and 4 bits."""
    g = torch.Generator(device).manual_seed(2)
    sizes = (300, 3)

    def some() -> list[torch.Tensor]:
        return [torch.randn(size, generator=g, device=device).abs() for size in sizes]

    numbers = (1e-2, 0.9, 0.99, 1e-8, 0.1, False, 7)
    for kind in ("fp32", "8bit", "4bit"):  # opcheck multiplies what it is given, which fp8 tensors cannot
        steps = [torch.full((), 2.0, device=device) for _ in sizes]
        origins = [torch.tensor([i, 8], device=device) for i, _ in enumerate(sizes)]
        moments = [some(), some()]
        scales: list[list[torch.Tensor]] = [[], []]
        if kind != "fp32":
            pairs = [[dynamic_codes.encode(t, kind, i == 0) for t in one] for i, one in enumerate(moments)]
            moments, scales = ([[pair[k] for pair in one] for one in pairs] for k in (0, 1))
        low = [t.bfloat16() for t in some()]
        lists = (low, some(), *moments, steps, origins, *scales, [])
        yield multi_adamw_codes.STEP, (*lists, None, None, None, *numbers, True)


def lion_samples(device: str):
    """Arguments for one step of Lion with moments of 32, 16 and 8 bits."""
    g = torch.Generator(device).manual_seed(4)
    sizes = (300, 3)

    def some() -> list[torch.Tensor]:
        return [torch.randn(size, generator=g, device=device) for size in sizes]

    one = torch.ones((), device=device)
    for kind in ("fp32", "bf16", "8bit"):
        origins = [torch.tensor([i, 8], device=device) for i, _ in enumerate(sizes)]
        steps = [torch.full((), 2.0, device=device) for _ in sizes]
        averages, scales = some(), []
        if kind == "bf16":
            averages = [t.bfloat16() for t in averages]
        if kind == "8bit":
            pairs = [dynamic_codes.encode(t, kind, True) for t in averages]
            averages, scales = ([pair[k] for pair in pairs] for k in (0, 1))
        low = [t.bfloat16() for t in some()]
        lists = (low, some(), averages, origins, steps, scales, [])
        yield multi_lion.STEP, (*lists, one * 0.1, one * 4, one * 0, 1e-2, 0.9, 0.99, 0.1, False, 7, True)


def muon_samples(device: str):
    """Arguments for Muon's two passes."""
    g = torch.Generator(device).manual_seed(3)

    def some(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(size, generator=g, device=device).to(dtype) for size in ((6, 8), (3, 5))]

    half = torch.bfloat16
    yield MOMENTUM, (some(), some(half), some(half), 0.9, True, False)
    yield APPLY, (some(), some(half), some(half), torch.full((), 0.1, device=device), 0.0, 2.0, 0.1)
    yield APPLY, (some(half), some(torch.float16), [], None, 0.1, 2.0, 0.1)
