"""Arguments to try each operator with: ``fp8_operands``."""

from __future__ import annotations

import torch

from rtkernels.ops.gemm.fp8_operands import OPERAND


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(20, 64, generator=g, device=device)
    for kind in ("group", "block", "row", "tensor", "hadamard"):
        for by_rows, transposed in ((True, False), (False, True), (True, True)):
            yield OPERAND, (x, kind, torch.float8_e4m3fn, False, by_rows, transposed, 64)
    yield OPERAND, (x[:, :50], "group", torch.float8_e5m2, True, True, True, 0)
    yield OPERAND, (x[:0], "group", torch.float8_e4m3fn, False, True, True, 0)
    yield OPERAND, (x.view(2, 10, 64), "block", torch.float8_e4m3fn, False, True, True, 0)
