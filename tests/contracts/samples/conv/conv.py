"""Samples and calls of ``conv``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.conv.depthwise import BACKWARD, FORWARD

CALLS = {"conv": lambda x, ids: rtkernels.conv(x.view(-1, 4, 8, 8), x[0, :36].reshape(4, 1, 3, 3), padding=1, groups=4)}


def samples(device: str):
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((2, 3, 1, 9, 6), (6, 1, 1, 3, 3), (6,)))
    window = (1, 1, 1, 0, 1, 1, 1, 1, 1)
    yield FORWARD, (x, weight, bias, *window)
    yield FORWARD, (x, weight, None, *window)
    dy = torch.randn(2, 6, 1, 9, 6, device=device)
    yield BACKWARD, (dy, x, weight, *window, True, True, True)
    yield BACKWARD, (dy[:, :3], x, weight[:3], *window, True, False, False)
