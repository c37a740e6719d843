"""Benchmark rows of ``quantize_fp8_experts``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.quant.quantize_fp8_experts import QUANTIZE
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES, GROUP, groups_of, row_blocks_of

# 32 experts of 2048 to 6144 rows each, multiples of 16.
_COUNTS = [4688, 3280, 5280, 2432, 2640, 2816, 5040, 2512, 3792, 2352, 2752, 5600, 5472, 2608, 4016, 2784]
_COUNTS += [5520, 2528, 3056, 3872, 2544, 5296, 2448, 3856, 2416, 3136, 4416, 5472, 3216, 3008, 4560, 3520]


def rows() -> Iterator[Row]:
    rows, cols = sum(_COUNTS), 1024

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)
        return {"x": x, "counts": torch.tensor(_COUNTS, dtype=torch.int32, device=device)}

    yield Row(
        name="quantize_fp8_experts",
        shape=f"{len(_COUNTS)} experts, {rows}x{cols}",
        make=make,
        ours=lambda x, counts: QUANTIZE(x, counts, "both", FP8_DTYPES[0], False),
        torch=_plain,
        bytes=4 * rows * cols + 4 * (rows * cols // GROUP + sum(map(groups_of, _COUNTS)) * cols) + 4 * len(_COUNTS),
    )


def _plain(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """The recipe in plain torch, for the counts above."""
    values = in_fp32(x)
    parts: tuple[list[Tensor], ...] = ([], [], [], [])
    for part in values.split(_COUNTS):
        scale = (part.unflatten(1, (-1, GROUP)).abs().amax(-1) / 448).clamp(min=1e-30)
        parts[0].append((part * (1 / scale).repeat_interleave(GROUP, 1)).clamp(-448, 448).to(torch.float8_e4m3fn))
        parts[1].append(scale.t().flatten())
        padded = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % GROUP)).unflatten(0, (-1, GROUP))
        scale = (padded.abs().amax(1) / 448).clamp(min=1e-30)
        inverse = (1 / scale).repeat_interleave(GROUP, 0)[: len(part)]
        parts[2].append((part * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).t().flatten())
        parts[3].append(scale)
    blank = row_blocks_of(len(x), len(_COUNTS)) - sum(map(len, parts[3]))
    parts[3].append(values.new_zeros(blank, x.shape[1]))
    q, scale, q_t, scale_t = parts
    codes = [torch.cat([part.view(torch.uint8) for part in each]).view(torch.float8_e4m3fn) for each in (q, q_t)]
    return codes[0], torch.cat(scale), codes[1], torch.cat(scale_t)
