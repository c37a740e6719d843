"""Arguments to try each operator with: ``glu_fp8``."""

from __future__ import annotations

import torch

from rtkernels.ops.act import glu_smooth_fp8 as smooth_quant
from rtkernels.ops.act.glu_fp8 import BACKWARD, FORWARD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 50, 2 * 136, generator=g, device=device)
    up, weight = x.flip(-1) * 2, x[..., 0].contiguous()
    counts = torch.tensor([0, 30, 120], device=device)
    yield FORWARD, (x, None, None, None, "silu", "both", False, "row", False)
    yield FORWARD, (x.bfloat16(), up.bfloat16(), weight, counts, "gelu_tanh", "both", True, "column", False)
    yield FORWARD, (x.half(), None, weight.half(), counts.int(), "swiglu_oai", "row", False, "row", False)
    yield FORWARD, (x, None, None, counts, "relu2", "transposed", False, "row", False)
    dy, merged = x[..., :128] * 3, x[..., :256]
    yield BACKWARD, (dy, merged, None, None, None, "silu", "both", False, "row", False, "fp8", False)
    yield (
        BACKWARD,
        (dy.half(), dy.half(), dy.half(), weight, counts, "gelu_erf", "row", True, "column", False, "both", True),
    )
    yield BACKWARD, (dy, merged, None, weight, counts, "swiglu_oai", "transposed", False, "row", False, "dense", True)
    half = x.half()
    smooth, lines = torch.rand(136, generator=g, device=device) + 0.5, torch.rand(3, 256, generator=g, device=device)
    yield smooth_quant.FORWARD, (x, None, smooth, weight, None, "silu", True, True, False)
    yield smooth_quant.FORWARD, (half, half, None, None, counts, "relu", False, False, False)
    common = "silu", "both", False, False, "both", True, 1
    yield smooth_quant.BACKWARD, (dy, merged, None, lines, weight, weight, counts, *common)
    yield smooth_quant.BACKWARD, (dy, merged, None, None, None, None, None, "none", "row", True, False, "fp8", False, 1)
