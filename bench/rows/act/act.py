"""Benchmark rows of ``act``, and of ``glu`` with quantised results, at the sizes of policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.act.act import act
from rtkernels.ops.act.glu import glu
from rtkernels.ops.shared.row_quant import Quant

E4M3 = torch.float8_e4m3fn


def _make(count: int, cols: int) -> Any:
    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(count, cols, dtype=torch.bfloat16, device=device, generator=generator)}

    return make


def _torch_glu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up * 50.0).clamp(-448, 448).to(E4M3)


def rows() -> Iterator[Row]:
    for count, cols in ((768, 4304), (8192, 4096)):
        yield Row(
            name="act_gelu_tanh", shape=f"{count}x{cols}", make=_make(count, cols),
            ours=lambda x: act(x, "gelu_tanh"), torch=lambda x: F.gelu(x, approximate="tanh"), bytes=4 * count * cols,
        )  # fmt: skip
    for count, cols in ((10, 4096), (968, 16384), (8192, 14336)):
        yield Row(
            name="glu_static_fp8", shape=f"{count}x2x{cols}", make=_make(count, 2 * cols),
            ours=lambda x: glu(x, act="gelu_tanh", quant=Quant(E4M3, 0.02)), torch=_torch_glu, bytes=5 * count * cols,
        )  # fmt: skip
