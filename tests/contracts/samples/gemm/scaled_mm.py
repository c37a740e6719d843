"""Arguments to try each operator with: ``scaled_mm``."""

from __future__ import annotations

import torch

from rtkernels.ops.gemm.scaled_mm import FORWARD, IN_PLACE, QUANTIZED


def options(recipe: str = "auto", layout: str = "auto", packed: str | None = None, act: str | None = None):
    """Return options of a product: result in fp32."""
    return recipe, layout, packed, act, torch.float32, "auto", "auto"


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    a, b, add = (torch.randn(shape, generator=g, device=device) for shape in ((2, 9, 64), (16, 64), (2, 9, 16)))
    a16, b16, bias = a.bfloat16(), b.bfloat16(), torch.ones(16, device=device)
    a8, b8 = a[0].to(torch.int8), b.to(torch.int8)
    rows, columns = torch.ones(9, device=device), torch.ones(16, device=device)
    yield FORWARD, (a16, b16, None, None, None, bias, add, *options(act="silu"))
    yield FORWARD, (a16.half(), b16.half().t(), None, None, None, None, None, *options(layout="kn"))
    yield FORWARD, (a8, b8, rows, columns, None, bias, None, *options("row"))
    yield IN_PLACE, (add.clone(), a16, b16, None, None, None, bias, None, *options(), True)
    yield QUANTIZED, (a16, b16, None, None, None, bias, None, *options()[:4], None, "auto", "auto", "1x128")
