"""Benchmark rows of ``nvfp4``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.quant.nvfp4 import dequantize_nvfp4, quantize_mxfp8, quantize_nvfp4
from rtkernels.ops.shared.block_formats import decode_e2m1, encode_mx, encode_nvfp4, swizzle


def _torch(x: Tensor) -> tuple[Tensor, Tensor]:
    return encode_nvfp4(x.float(), torch.ones((), device=x.device), "rne", "rne")


def _torch_two_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    packed, scales = encode_nvfp4(x.float(), x.abs().amax().float() / 2688, "rne", "rne")
    return packed, swizzle(scales)


def rows() -> Iterator[Row]:
    for count, cols in ((968, 2048), (8192, 4096)):

        def make(device: str, generator: torch.Generator, count: int = count, cols: int = cols) -> dict[str, Any]:
            return {"x": torch.randn(count, cols, dtype=torch.bfloat16, device=device, generator=generator)}

        n = count * cols
        yield Row(
            name="quantize_nvfp4", shape=f"{count}x{cols}", make=make,
            ours=lambda x: quantize_nvfp4(x, global_scale=1.0)[:2], torch=_torch, bytes=2 * n + n * 9 // 16,
        )  # fmt: skip
        yield Row(
            name="quantize_nvfp4_two_levels", shape=f"{count}x{cols}", make=make,
            ours=lambda x: quantize_nvfp4(x, swizzled=True)[:2], torch=_torch_two_levels, bytes=4 * n + n * 9 // 16,
        )  # fmt: skip
        yield Row(
            name="quantize_mxfp8", shape=f"{count}x{cols}", make=make, ours=quantize_mxfp8,
            torch=lambda x: encode_mx(x.float(), torch.float8_e4m3fn, "ocp"), bytes=3 * n + n // 32,
        )  # fmt: skip

    def coded(device: str, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(8192, 4096, dtype=torch.bfloat16, device=device, generator=generator)
        packed, scales, _ = quantize_nvfp4(x, global_scale=1.0)
        values = decode_e2m1(torch.arange(16, dtype=torch.uint8, device=device))[::2]
        return {"packed": packed, "scales": scales, "values": values}

    yield Row(
        name="dequantize_nvfp4", shape="8192x4096", make=coded,
        ours=lambda packed, scales, values: dequantize_nvfp4(packed, scales),
        torch=lambda packed, scales, values: (
            values[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]
            * scales.float().repeat_interleave(16, -1)
        ).bfloat16(),
        bytes=8192 * 4096 * 2 + 8192 * 4096 * 9 // 16,
    )  # fmt: skip
