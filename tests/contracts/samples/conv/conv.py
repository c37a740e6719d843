"""Samples and calls of ``conv``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.conv.depthwise import FORWARD

CALLS = {"conv": lambda x, ids: rtkernels.conv(x.view(-1, 4, 8, 8), x[0, :36].reshape(4, 1, 3, 3), padding=1, groups=4)}


def samples(device: str):
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((2, 3, 9, 6), (6, 1, 3, 3), (6,)))
    yield FORWARD, (x, weight, bias, 1, 1, 1, False)
    yield FORWARD, (x, weight, None, 2, 1, 0, False)
    yield FORWARD, (x, weight[:3], None, 1, 2, -1, True)
