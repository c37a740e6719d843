"""Arguments to try each operator with: ``step_token``."""

from __future__ import annotations

import torch

from rtkernels.ops.reduce.step_token import FORWARD


def samples(device: str):
    logits = torch.randn(2, 40, generator=torch.Generator(device).manual_seed(0), device=device)
    for stop, rings in ((torch.tensor([3], device=device), [0, 4]), (None, [0])):
        token, position = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
        length, active = torch.ones(2, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.bool, device=device)
        columns, result = (
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros(5, dtype=torch.int64, device=device),
        )
        places = torch.zeros(len(rings), 2, 2, dtype=torch.int32, device=device)
        state = token, position, length, active, columns, result, places
        yield FORWARD, (logits, stop, torch.tensor(rings, device=device), *state, 0)
