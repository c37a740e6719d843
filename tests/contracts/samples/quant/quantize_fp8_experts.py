"""Arguments to try each operator with: ``quantize_fp8_experts``."""

from __future__ import annotations

import torch

from rtkernels.ops.quant.quantize_fp8_experts import QUANTIZE
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES, LAYOUTS


def samples(device: str):
    x = torch.randn(131, 136, generator=torch.Generator(device).manual_seed(0), device=device)
    for output, kind in zip(LAYOUTS, (torch.int32, torch.int64, torch.int32), strict=True):
        yield QUANTIZE, (x, torch.tensor([1, 129, 0, 1], dtype=kind, device=device), output, FP8_DTYPES[0], True)
