"""Samples and calls of ``gated_delta_rule``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.attention.gated_delta_rule import BACKWARD, FORWARD, ONE
from rtkernels.ops.attention.gated_delta_rule_parallel import CHAIN


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 4, 64).bfloat16()


CALLS = {
    "gated_delta_rule": lambda x, ids: rtkernels.gated_delta_rule(
        *(_heads(factor * x)[None] for factor in (1, 2, 3)),
        -x[None, :, :4].abs(),
        x[None, :, :4].sigmoid(),
        l2norm=True,
    ),
    "gated_delta_rule_step": lambda x, ids: rtkernels.gated_delta_rule_step(
        *(_heads(x.detach()),) * 3, -x.detach()[:, :4].abs(), x.detach()[:, :4].sigmoid(),
        x.new_zeros(x.shape[0], 4, 64, 64), l2norm=True,
    ),
    "gated_delta_rule, raw gates": lambda x, ids: rtkernels.gated_delta_rule(
        *(_heads(factor * x)[None] for factor in (1, 2, 3)), x[None, :, :4], x[None, :, 4:8], l2norm=True,
        A_log=torch.zeros(4, device=x.device), dt_bias=torch.ones(4, device=x.device), lower_bound=-5.0,
        beta_sigmoid=True, beta_scale=2.0,
    ),
    "gated_delta_rule_step, raw gates": lambda x, ids: rtkernels.gated_delta_rule_step(
        *(_heads(x.detach()),) * 3, x.detach()[:, :4], x.detach()[:, 4:8], x.new_zeros(x.shape[0], 4, 64, 64),
        A_log=torch.zeros(4, device=x.device), dt_bias=torch.ones(4, device=x.device), beta_sigmoid=True,
        slots=torch.arange(x.shape[0], dtype=torch.int32, device=x.device),
    ),
}  # fmt: skip


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = (normal(2, 5, heads, width).bfloat16() for heads, width in ((2, 16), (2, 16), (4, 24)))
    g, beta, state = -normal(2, 5, 4).abs(), normal(2, 5, 4).sigmoid(), normal(2, 4, 16, 24)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    for values in (
        (q, k, v, g, beta, None, None, 0.25, False, False),
        (q[0], k[0], v[0], g[0], beta[0], state, cu, 0.25, True, True),
    ):
        yield FORWARD, values
        dout = torch.ones_like(values[2])
        yield BACKWARD, (dout, state if values[-1] else None, *values[:-1], values[-1])
    channels = -normal(2, 5, 4, 16).abs()
    keys = q.repeat_interleave(2, 2)
    yield FORWARD, (keys, keys, v, channels, beta, None, None, 0.25, True, False)
    yield BACKWARD, (torch.ones_like(v), None, keys, keys, v, channels, beta, None, None, 0.25, True, False)
    plain = (None, None, None, 0.25, True, 0.0, False, 1.0)
    yield ONE, (*(t[:, 0] for t in (keys, keys, v, channels, beta)), state.clone(), *plain)
    yield ONE, (*(t[:, 0] for t in (q, k, v, g, beta)), state.clone(), *plain)
    slots = torch.tensor([1, -1], dtype=torch.int32, device=device)
    for decay in (g, channels):
        bias = normal(*decay.shape[2:])
        rows = [t[:, 0] for t in (q, k, v, decay.bfloat16(), beta.bfloat16())]
        yield ONE, (*rows, state.bfloat16(), normal(4), bias, slots, 0.25, True, -5.0, True, 2.0)
    for reverse in (False, True):
        yield CHAIN, (normal(2, 4, 2, 16, 16), normal(2, 4, 2, 16, 24), reverse)
