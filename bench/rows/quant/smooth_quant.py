"""Benchmark rows of ``quantize_fp8_smooth`` and of granularity "channel"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.quant import quantize_fp8_channel as channel
from rtkernels.ops.quant.smooth_quant import SMOOTH
from rtkernels.runtime.operator.operator import TorchOp


def _rows_of(smooth_op: TorchOp, channel_op: TorchOp) -> Iterator[Row]:
    """Yield the benchmark rows of the operators given."""
    rows, cols, e4m3 = 8192, 4096, torch.float8_e4m3fn

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)
        return {"x": x, "smooth": torch.rand(cols, device=device, generator=generator) + 0.5}

    def make_plain(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"x": make(device, generator)["x"]}

    def plain(z: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        scale = (z.abs().amax(dim, keepdim=True) / 448).clamp(min=1e-30)
        return (z * (1 / scale)).clamp(-448, 448).to(e4m3), scale.flatten()

    def plain_channel(x: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = plain(in_fp32(x), 0)
        return q.t().contiguous(), scale

    yield Row(
        name="quantize_fp8_smooth",
        shape=f"{rows}x{cols}",
        make=make,
        ours=lambda x, smooth: smooth_op(x, smooth, None, e4m3, False, False)[:2],
        torch=lambda x, smooth: plain(in_fp32(x) * smooth, 1),
        bytes=3 * rows * cols + 4 * (rows + cols),
    )
    yield Row(
        name="quantize_fp8_smooth_amax",
        shape=f"{rows}x{cols}",
        make=make,
        ours=lambda x, smooth: smooth_op(x, smooth, None, e4m3, False, True),
        torch=lambda x, smooth: (*plain(in_fp32(x) * smooth, 1), in_fp32(x).abs().amax(0)),
        bytes=3 * rows * cols + 4 * (rows + 2 * cols),
    )
    yield Row(
        name="quantize_fp8_channel",
        shape=f"{rows}x{cols}",
        make=make_plain,
        ours=lambda x: channel_op(x, None, None, e4m3, False, 1),
        torch=plain_channel,
        # The scale of a column is known only after reading it: two reads and a write.
        bytes=5 * rows * cols + 4 * cols,
    )


def rows() -> Iterator[Row]:
    """Yield the benchmark rows."""
    yield from _rows_of(SMOOTH, channel.CHANNEL)
