"""Benchmark rows of ``quantize_int8``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.act.quantize_int8 import quantize_int8


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    return {"quantize_int8": lambda: quantize_int8(x)}


def _torch_quantize(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    magnitude = in_fp32(x).abs()
    scale = ((magnitude.amax(-1) if granularity == "row" else magnitude.amax()) / 127).clamp(min=1e-30)
    factor = scale[:, None] if granularity == "row" else scale
    return (in_fp32(x) * (1 / factor)).round().clamp(-127, 127).to(torch.int8), scale


def rows() -> Iterator[Row]:
    count = 8192
    for cols in (2048, 4096, 8192):

        def make(device: str, generator: torch.Generator, cols: int = cols) -> dict[str, Any]:
            return {"x": torch.randn(count, cols, dtype=torch.bfloat16, device=device, generator=generator)}

        for granularity in ("row", "tensor"):
            yield Row(
                name=f"quantize_int8_{granularity}", shape=f"{count}x{cols}", make=make,
                ours=lambda x, g=granularity: quantize_int8(x, granularity=g),
                torch=lambda x, g=granularity: _torch_quantize(x, g),
                # The scale of a whole tensor is known only after reading it: two reads and a write.
                bytes=(3 if granularity == "row" else 5) * count * cols + 4 * (count if granularity == "row" else 1),
            )  # fmt: skip
