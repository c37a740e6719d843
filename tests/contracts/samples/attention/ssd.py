"""Samples and calls of ``ssd``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.attention.ssd import BACKWARD, FORWARD, ONE


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 4, 64).bfloat16()


def _rates(x: torch.Tensor) -> torch.Tensor:
    return -torch.ones(4, device=x.device)


CALLS = {
    "ssd": lambda x, ids: rtkernels.ssd(
        _heads(x)[None], x[None, :, :4], _rates(x), *(_heads(x)[None, :, :2],) * 2, D=_rates(x), dt_bias=_rates(x),
        dt_softplus=True,
    ),
    "ssd_step": lambda x, ids: rtkernels.ssd_step(
        _heads(x.detach()), x.detach()[:, :4], _rates(x), *(_heads(x.detach())[:, :2],) * 2,
        x.new_zeros(x.shape[0], 4, 64, 64), D=_rates(x), dt_softplus=True,
    ),
}  # fmt: skip


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = (normal(2, 5, heads, width).bfloat16() for heads, width in ((2, 16), (2, 16), (4, 24)))
    g, dt, state, skip = -normal(2, 5, 4).abs(), normal(2, 5, 4).sigmoid(), normal(2, 4, 16, 24), normal(4)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    for values in (
        (q, k, v, g, dt, None, None, None, False),
        (q[0], k[0], v[0], g[0], dt[0], skip, state, cu, True),
    ):
        yield FORWARD, values
        dout = torch.ones_like(values[2])
        yield BACKWARD, (dout, state if values[-1] else None, *values)
    rows = [t[:, 0] for t in (v, dt)]
    yield (
        ONE,
        (
            *(rows[0], rows[1], -skip.abs(), k[:, 0], q[:, 0], skip, None, state.transpose(2, 3).contiguous()),
            *(True, 0.0, 1.5),
        ),
    )
