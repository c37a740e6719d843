"""Arguments to try each operator with: ``attention``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.attention import BACKWARD, FORWARD, OUT


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, k, v = normal(2, 5, 4, 16), normal(2, 7, 2, 16), normal(2, 7, 2, 24)
    sinks, bias = normal(4).float(), normal(1, 1, 5, 7).expand(2, 4, 5, 7)
    dense = (0.25, -1, 0, 0.0, 0, 0, False, "auto")
    heads_first = (0.25, 3, 1, 2.0, 0, 0, True, "mma")
    packed = (0.25, -1, 0, 0.0, 5, 7, False, "auto")
    ends = integers(0, 2, 5), integers(0, 4, 7)
    calls = (
        ((q, k, v, None, None, None, None, None, None), dense),
        ((q, k, v, sinks, bias, integers(7, 3), integers(1, 2, 3, 4, 5), None, None), heads_first),
        ((q[0], k[0], v[0], sinks, None, None, None, *ends), packed),
    )
    for tensors, options in calls:
        yield FORWARD, (*tensors, *options)
        out, lse = FORWARD(*tensors, *options)
        yield OUT, (*tensors, torch.empty_like(out), *options)
        needs = (True, True, options[6], tensors[3] is not None, tensors[4] is not None)
        yield (
            BACKWARD,
            (torch.ones_like(out), torch.ones_like(lse), *tensors[:3], out, lse, *tensors[3:], *options, *needs),
        )
