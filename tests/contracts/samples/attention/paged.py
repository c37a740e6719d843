"""Arguments to try each operator with: ``paged``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.paged import FORWARD, OUT


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def integers(*values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, k, v = normal(5, 4, 16), normal(3, 16, 2, 16), normal(3, 16, 2, 32)
    ends, used, table = integers(0, 2, 5), integers(17, 9), integers([1, 0], [2, -1])
    scale, sinks = torch.tensor([0.5, 0.25], device=device), torch.ones(4, device=device)
    codes = (16 * k).to(torch.int8), (16 * v).to(torch.int8)
    calls = (
        ((q, k, v, ends, used, table, None, None, None, None), (0.25, -1, 0, 0.0, 3, 17, "auto")),
        ((q, *codes, ends, used, table, scale, scale, sinks, None), (0.25, 5, 0, 2.0, 3, 17, "auto")),
        ((q[:3], k, v, integers(0, 1, 2), used, table, None, None, sinks, None), (0.25, -1, 0, 0.0, 1, 17, "auto")),
        ((q, k, v, ends, used, table, None, None, None, sinks), (0.25, -1, 0, 0.0, 3, 17, "auto")),
    )
    for tensors, options in calls:
        yield FORWARD, (*tensors, *options)
        yield OUT, (*tensors, torch.empty_like(FORWARD(*tensors, *options)[0]), *options)
