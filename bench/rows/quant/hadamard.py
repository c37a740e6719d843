"""Benchmark rows of ``hadamard``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.quant.hadamard import QUANTIZE, TRANSFORM, _transformed


def _plain_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    z = _transformed(x, 128)
    scale = (z.abs().amax(1, keepdim=True) / 448).clamp(min=1e-30)
    return (z * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale.flatten()


def rows() -> Iterator[Row]:
    rows, cols = 8192, 4096

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)}

    for block in (64, 256):
        yield Row(
            name="hadamard",
            shape=f"{rows}x{cols} block {block}",
            make=make,
            ours=lambda x, b=block: TRANSFORM(x, b, x.dtype),
            torch=lambda x, b=block: _transformed(x, b).to(x.dtype),
            bytes=4 * rows * cols,
        )
    yield Row(
        name="quantize_fp8_hadamard",
        shape=f"{rows}x{cols} block 128",
        make=make,
        ours=lambda x: QUANTIZE(x, 128, torch.float8_e4m3fn, False),
        torch=_plain_quantize,
        bytes=3 * rows * cols + 4 * rows,
    )
