"""Arguments to try each operator with: ``grouped_mm``."""

from __future__ import annotations

import torch

from rtkernels.ops.gemm.grouped_mm import FORWARD, IN_PLACE, WGRAD


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    a, b, c = (torch.randn(shape, generator=g, device=device) for shape in ((9, 64), (3, 16, 64), (3, 5, 64)))
    a16, b16 = a.bfloat16(), b.bfloat16()
    ends, sizes = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([4, 4, 9], [5, 0, 5]))
    labels = torch.tensor([0] * 4 + [2] * 5, dtype=torch.int32, device=device)
    options = ("auto", "auto", None, None, torch.float32, "auto", "auto")
    yield FORWARD, (a16, b16, None, None, ends, None, None, 1, 0, *options)
    yield FORWARD, (a16, b16, None, None, None, labels, None, 1, 0, *options)
    out = torch.ones(9, 16, device=device)
    yield IN_PLACE, (out, a16, b16, None, None, ends, None, None, 1, 0, *options, True)
    out = torch.ones(3, 5, 16, device=device)
    yield IN_PLACE, (out, c.bfloat16(), b16, None, None, None, None, sizes, 1, 3, *options, False)
    out = torch.ones(3, 16, 64, device=device)
    dy = torch.randn(9, 16, generator=g, device=device).bfloat16()
    yield WGRAD, (out, dy.t(), a16.t(), None, None, ends, 1, True, "auto", "auto", "auto")
