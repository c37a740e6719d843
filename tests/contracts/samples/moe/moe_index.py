"""Arguments to try each operator with: ``moe_index``."""

from __future__ import annotations

import torch

from rtkernels.ops.moe.moe_index import INDEX, ROW_ID_MAP


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    choices = torch.randint(-1, 6, (9, 3), generator=g, device=device)
    routing_map = torch.rand(9, 8, generator=g, device=device) < 0.4
    yield INDEX, (choices, 5, 3, 4, 44)
    yield INDEX, (choices.int(), 5, 3, 1, 9)
    yield INDEX, (routing_map, 8, 3, 16, 150)
    yield ROW_ID_MAP, (routing_map, 4, 96)
