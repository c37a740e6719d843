"""Arguments to try each operator with: ``gated_mm``."""

from __future__ import annotations

import torch

from contracts.samples.gemm.scaled_mm import options
from rtkernels.ops.gemm.gated_mm import FORWARD, QUANTIZED


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(shape, generator=g, device=device).bfloat16() for shape in ((2, 9, 64), (32, 64)))
    bias = torch.ones(32, device=device)
    yield FORWARD, (a, b, None, None, None, bias, None, *options(act="silu"))
    yield QUANTIZED, (a, b, None, None, None, bias, None, *options(act="gelu_tanh")[:4], None, "auto", "auto", "row")
