"""Samples of ``delta_gates``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.delta_gates import BACKWARD, FORWARD


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    beta, rate = normal(2, 5, 4).bfloat16(), normal(4)
    for width, bound in ((4, 0.0), (4 * 16, -5.0)):
        given = (beta, normal(2, 5, width).bfloat16(), rate, normal(width))
        yield FORWARD, (*given, bound, True, 2.0)
        yield BACKWARD, (*given, normal(2, 5, width), normal(2, 5, 4), bound, True, 2.0, True, True, True)
    odd = (normal(3, 7), normal(3, 7), normal(7), None)
    yield FORWARD, (*odd, 0.0, False, 1.0)
    yield BACKWARD, (*odd, normal(3, 7), None, 0.0, False, 1.0, True, False, True)
    yield FORWARD, (beta, None, None, None, 0.0, True, 1.0)
    yield BACKWARD, (beta, None, None, None, None, normal(2, 5, 4), 0.0, True, 1.0, False, True, False)
