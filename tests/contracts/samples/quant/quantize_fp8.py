"""Arguments to try each operator with: ``quantize_fp8``."""

from __future__ import annotations

import torch

from rtkernels.ops.quant.quantize_fp8 import BOTH, DEQUANTIZE, QUANTIZE, STATIC


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 136, generator=g, device=device)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    layouts = {"tensor": "row", "row": "row", "group": "column", "group_t": "row", "block": "row"}
    for granularity, layout in layouts.items():
        yield QUANTIZE, (x, granularity, e4m3, True, layout)
        q, scale = QUANTIZE(x, granularity, e4m3, True, layout)
        # torch's checks compare inputs before and after the call, which it cannot do for fp8.
        yield DEQUANTIZE, (q.view(torch.uint8), scale, granularity, e4m3, torch.bfloat16, layout)
    yield QUANTIZE, (x.bfloat16(), "group", e5m2, False, "row")
    yield BOTH, (x.bfloat16(), "group", e4m3, False, "row")
    yield BOTH, (x, "block", e5m2, False, "row")
    yield STATIC, (x, torch.tensor(0.02, device=device), e5m2)
