"""Arguments to try each operator with: ``lightning``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.lightning import BACKWARD, FORWARD, ONE


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q, k, v, decay = normal(2, 5, 3, 16), normal(2, 5, 3, 16), normal(2, 5, 3, 24), torch.ones(3, device=device)
    state, cu = normal(2, 3, 16, 24).float(), torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    calls = (
        ((q, k, v, decay, None, None, 0.25, False), (True, True, True, False)),
        ((q[0], k[0], v[0], decay, state, cu, 0.25, True), (True, True, False, True)),
    )
    for values, needs in calls:
        yield FORWARD, values
        out, _ = FORWARD(*values)
        yield BACKWARD, (torch.ones_like(out), state if values[-1] else None, *values, *needs)
    yield ONE, (q[:, 0], k[:, 0], v[:, 0], decay, state.clone(), 0.25)
