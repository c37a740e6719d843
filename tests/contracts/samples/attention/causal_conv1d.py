"""Samples and calls of ``causal_conv1d``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.attention.causal_conv1d import BACKWARD, FORWARD, ONE

CALLS = {
    "causal_conv1d": lambda x, ids: rtkernels.causal_conv1d(x[None], x.new_ones(256, 4)),
    "causal_conv1d_step": lambda x, ids: rtkernels.causal_conv1d_step(
        x.detach(), x.new_ones(256, 4), None, x.new_zeros(x.shape[0], 256, 4)
    ),
}


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, weight, bias, state = normal(2, 5, 16), normal(16, 4), normal(16), normal(2, 16, 4)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    yield FORWARD, (x, weight, None, None, None, False, 4, False)
    yield FORWARD, (x[0], weight, bias, state, cu, True, 4, True)
    yield BACKWARD, (x.flip(0), None, x, weight, None, None, None, False, 4, True, True, False, False)
    yield BACKWARD, (x[1], state.flip(0), x[0], weight, bias, state, cu, True, 4, True, True, True, True)
    yield ONE, (x[:, 0], weight, bias, state.clone(), True)
