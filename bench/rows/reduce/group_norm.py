"""Benchmark rows of ``group_norm`` and of torch's through ``aten``: planes of a diffusion model's UNet and of a VAE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.reduce.group_norm import BACKWARD, FORWARD, group_norm
from rtkernels.ops.reduce.group_norm_plan import normalize

_GROUPS, _EPS = 32, 1e-5


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    return {"group_norm": lambda: group_norm(x, groups=_GROUPS)}


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    planes = x.float().unflatten(1, (_GROUPS, -1))
    variance, mean = torch.var_mean(planes, (2, 3), correction=0, keepdim=True)
    y = ((planes - mean) * torch.rsqrt(variance + _EPS)).flatten(1, 2)
    return (y * weight.float()[:, None] + bias.float()[:, None]).to(x.dtype)


def _plain_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.silu(_plain(x.float(), weight, bias)).to(x.dtype)


def _torch_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, _GROUPS, weight, bias, _EPS))


def _torch_bwd(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.enable_grad():
        return torch.autograd.grad(_torch_silu(*leaves), leaves, dy)


def rows() -> Iterator[Row]:
    for batch, channels, side in ((8, 320, 64), (4, 512, 128)):

        def make(device: str, generator: torch.Generator, size=(batch, channels, side)) -> dict[str, Any]:
            batch, channels, side = size
            shapes = {"x": (batch, channels, side * side), "weight": (channels,), "bias": (channels,)}
            return {
                name: torch.randn(shape, device=device, generator=generator).bfloat16()
                for name, shape in shapes.items()
            }

        def make_bwd(device: str, generator: torch.Generator, make=make) -> dict[str, Any]:
            given = make(device, generator)
            dy = torch.randn(given["x"].shape, device=device, generator=generator).bfloat16()
            _, mean, rstd = FORWARD(given["x"], given["weight"], given["bias"], _GROUPS, _EPS, True)
            return {"dy": dy, **given, "mean": mean, "rstd": rstd}

        shape, size = f"{batch}x{channels}x{side}x{side}, {_GROUPS} groups", 2 * batch * channels * side * side
        yield Row(
            name="group_norm_fwd",
            shape=shape,
            make=make,
            ours=lambda x, weight, bias: normalize(x, weight, bias, _GROUPS, _EPS)[0],
            torch=_plain,
            fused=lambda x, weight, bias: torch.nn.functional.group_norm(x, _GROUPS, weight, bias, _EPS),
            bytes=2 * size,
        )
        yield Row(
            name="group_norm_silu_fwd",
            shape=shape,
            make=make,
            ours=lambda x, weight, bias: group_norm(x, weight, bias, groups=_GROUPS, act="silu"),
            torch=_plain_silu,
            fused=_torch_silu,
            bytes=2 * size,
        )
        yield Row(
            name="group_norm_silu_bwd",
            shape=shape,
            make=make_bwd,
            ours=lambda dy, x, weight, bias, mean, rstd: BACKWARD(
                dy, x, weight, bias, mean, rstd, _GROUPS, True, True, True, True
            ),
            torch=_torch_bwd,
            bytes=3 * size,
        )
