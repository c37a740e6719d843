"""Arguments to try each operator with: ``softmax``."""

from __future__ import annotations

import torch

from rtkernels.ops.reduce.softmax import BACKWARD, FORWARD, IN_PLACE


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    lengths = torch.arange(15, device=device).view(3, 5) * 3
    y = torch.softmax(x, -1)
    yield FORWARD, (x, None, 1.0, False)
    yield FORWARD, (x.bfloat16(), lengths, 0.5, True)
    yield IN_PLACE, (x.clone(), lengths.int(), -1.0, False)
    yield BACKWARD, (x, y, None, 1.0, False)
    yield BACKWARD, (x.half(), y.log().half(), lengths, 0.5, True)
