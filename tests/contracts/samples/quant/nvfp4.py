"""Arguments to try each operator with: ``nvfp4``."""

from __future__ import annotations

import torch

from rtkernels.ops.quant.nvfp4 import DEQUANTIZE, QUANTIZE, SWIZZLE

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def samples(device: str):
    x = torch.randn(3, 64, generator=torch.Generator(device).manual_seed(0), device=device)

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    codes, scales, g = empty(3, 32), empty(3, 4, dtype=E4M3), torch.ones((), device=device)
    yield QUANTIZE, (x, None, None, codes, scales, g, "nvfp4", False, "rne", "rne", 0.0)
    factors = torch.ones(64, device=device)
    yield QUANTIZE, (x, g, factors, codes, empty(512, dtype=E4M3), None, "nvfp4", True, "mse", "away", 0.0)
    yield (
        QUANTIZE,
        (x, None, None, empty(3, 64, dtype=E4M3), empty(3, 2, dtype=E8M0), None, "mxfp8", False, "nv", "rne", 1.0),
    )
    yield SWIZZLE, (empty(3, 5) + 7,)
    yield DEQUANTIZE, (codes, scales, g, torch.zeros(3, 64, device=device), "nvfp4", False)
