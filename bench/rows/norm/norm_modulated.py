"""Benchmark rows of ``norm_modulated``: the normalisations of policies, at the sizes that they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.norm.layer_norm import layer_norm
from rtkernels.ops.norm.rms_norm import rms_norm
from rtkernels.ops.shared.block_formats import encode_nvfp4
from rtkernels.ops.shared.row_quant import Quant

E4M3 = torch.float8_e4m3fn


def _codes(y: Tensor, scale: Tensor) -> Tensor:
    return (y * (1 / scale)).clamp(-448, 448).to(E4M3)


def _torch(x: Tensor, residual: Tensor, style: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    gain, shift, _ = style.float().chunk(3, -1)
    y = F.rms_norm(h.float(), (x.shape[-1],), None, 1e-6) * (1 + gain) + shift
    return _codes(y, scale), h


def _ours(x: Tensor, residual: Tensor, style: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    result = rms_norm(x, residual=residual, style=style, quant=Quant(E4M3, scale))
    return result.out, result.residual


def _torch_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x.float(), (x.shape[-1],), None, 1e-6)
    return encode_nvfp4(y, torch.ones((), device=x.device), "rne", "rne")


def _ours_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    result = rms_norm(x, quant=Quant("nvfp4", 1.0))
    return result.out, result.scale


def rows() -> Iterator[Row]:
    for count, cols in ((10, 1024), (51, 1536), (968, 2048), (8192, 4096)):

        def make(device: str, generator: torch.Generator, count: int = count, cols: int = cols) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            scale = torch.full((1,), 0.02, device=device)
            given = {"x": normal(count, cols), "residual": normal(count, cols), "style": normal(count, 3 * cols)}
            return {**given, "scale": scale}

        n = count * cols
        yield Row(
            name="rms_norm_residual_style_fp8", shape=f"{count}x{cols}", make=make, ours=_ours, torch=_torch,
            bytes=n * (2 + 2 + 4 + 2 + 1),
        )  # fmt: skip
        yield Row(
            name="rms_norm_residual_layer_style_fp8", shape=f"{count}x{cols}",
            make=lambda device, g, make=make: {**(given := make(device, g)), "style": given["style"][0].contiguous()},
            ours=_ours, torch=_torch, bytes=n * (2 + 2 + 2 + 1),
        )  # fmt: skip
        yield Row(
            name="rms_norm_nvfp4", shape=f"{count}x{cols}",
            make=lambda device, g, make=make: {"x": make(device, g)["x"]},
            ours=_ours_nvfp4, torch=_torch_nvfp4,
            bytes=n * 2 + n * 9 // 16,
        )  # fmt: skip
    yield Row(
        name="layer_norm_fp8", shape="768x1152 vision",
        make=lambda device, g: {
            "x": torch.randn(768, 1152, dtype=torch.bfloat16, device=device, generator=g),
            "weight": torch.ones(1152, dtype=torch.bfloat16, device=device),
        },
        ours=lambda x, weight: layer_norm(x, weight, weight, quant=Quant(E4M3, 0.02)),
        torch=lambda x, weight: _codes(
            F.layer_norm(x.float(), (1152,), weight.float(), weight.float()), torch.full((), 0.02, device=x.device)
        ),
        bytes=768 * 1152 * 3,
    )  # fmt: skip
