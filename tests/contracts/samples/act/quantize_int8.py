"""Samples and calls of ``quantize_int8``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.act.quantize_int8 import QUANTIZE

CALLS = {"quantize_int8": lambda x, ids: rtkernels.quantize_int8(x)}


def samples(device: str):
    yield QUANTIZE, (torch.randn(2, 3, 8, device=device), "row")
    yield QUANTIZE, (torch.randn(3, 7, device=device, dtype=torch.bfloat16), "tensor")
