"""Benchmark rows of GroupNorm, which ``aten`` overrides: the planes of a diffusion model's UNet and of a VAE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.reduce.group_norm import group_norm

_GROUPS, _EPS = 32, 1e-5


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    planes = x.float().unflatten(1, (_GROUPS, -1))
    variance, mean = torch.var_mean(planes, (2, 3), correction=0, keepdim=True)
    y = ((planes - mean) * torch.rsqrt(variance + _EPS)).flatten(1, 2)
    return (y * weight.float()[:, None] + bias.float()[:, None]).to(x.dtype)


def rows() -> Iterator[Row]:
    for batch, channels, side in ((8, 320, 64), (4, 512, 128)):

        def make(device: str, generator: torch.Generator, size=(batch, channels, side)) -> dict[str, Any]:
            batch, channels, side = size
            shapes = {"x": (batch, channels, side * side), "weight": (channels,), "bias": (channels,)}
            return {
                name: torch.randn(shape, device=device, generator=generator).bfloat16()
                for name, shape in shapes.items()
            }

        yield Row(
            name="group_norm_fwd",
            shape=f"{batch}x{channels}x{side}x{side}, {_GROUPS} groups",
            make=make,
            ours=lambda x, weight, bias: group_norm(x, weight, bias, _GROUPS, _EPS)[0],
            torch=_plain,
            fused=lambda x, weight, bias: torch.nn.functional.group_norm(x, _GROUPS, weight, bias, _EPS),
            bytes=4 * batch * channels * side * side,
        )
