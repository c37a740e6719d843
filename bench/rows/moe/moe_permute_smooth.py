"""Benchmark rows of ``moe_permute_smooth``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.moe.moe_permute import MAIN, make
from bench.rows.row import Row
from rtkernels.ops.moe.moe_permute_smooth import SMOOTH
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES


def _plain(x: Tensor, rows: Tensor, slots: Tensor, experts: Tensor, smooth: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    used = (slots >= 0)[:, None]
    source, expert = slots.clamp(min=0) // rows.shape[1], experts.flatten()[slots.clamp(min=0).long()]
    z = x if x.dtype == torch.float64 else x.float()
    z = torch.where(used, z[source.long()] * smooth[expert.long()], 0)
    scale = (z.abs().amax(1) / 448).clamp(min=1e-30)
    return (z * (1 / scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _make(device: str, generator: torch.Generator) -> dict[str, Any]:
    smooth = torch.rand(MAIN.experts, MAIN.cols, device=device, generator=generator) + 0.5
    return {**make(MAIN, device, generator, "x"), "smooth": smooth}


def rows() -> Iterator[Row]:
    yield Row(
        name="permute_smooth",
        shape=MAIN.shape,
        make=_make,
        ours=lambda x, rows, slots, experts, smooth, **_: SMOOTH(
            x, rows, slots, experts, smooth, None, None, FP8_DTYPES[0], False
        ),
        torch=_plain,
        bytes=2 * MAIN.tokens * MAIN.cols + MAIN.rows * (MAIN.cols + 8) + 4 * (MAIN.experts * MAIN.cols + MAIN.choices),
    )
