"""Benchmark rows of ``causal_conv1d``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from bench.rows.row import Row, gradients_of
from rtkernels.ops.attention.causal_conv1d import BACKWARD, causal_conv1d, causal_conv1d_step


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    weight, state = x.new_ones(x.shape[1], 4), x.new_zeros(*x.shape, 4)
    return {
        "causal_conv1d": lambda: causal_conv1d(x[None], weight),
        "causal_conv1d_step": lambda: causal_conv1d_step(x, weight, None, state),
    }


def _plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As transformers' layers do it without a kernel: [batch, channels, length] views."""
    padded = functional.conv1d(x.mT, weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=weight.shape[0])
    return functional.silu(padded[..., : x.shape[1]]).mT


def rows() -> Iterator[Row]:
    for batch, length, channels in ((1, 8192, 8192), (8, 4096, 8192)):
        n = 2 * batch * length * channels

        def make(device: str, generator: torch.Generator, size=(batch, length, channels)) -> dict[str, Any]:
            x = torch.randn(*size, dtype=torch.bfloat16, device=device, generator=generator)
            weight = torch.randn(size[2], 4, dtype=torch.bfloat16, device=device, generator=generator)
            return {"x": x, "weight": weight}

        def make_bwd(device: str, generator: torch.Generator, make=make) -> dict[str, Any]:
            given = make(device, generator)
            dy = torch.randn(given["x"].shape, device=device, generator=generator).to(given["x"].dtype)
            return {"dy": dy, **given}

        yield Row(
            name="causal_conv1d_fwd", shape=f"{batch}x{length}x{channels} 4 taps", make=make,
            ours=lambda x, weight: causal_conv1d(x, weight), torch=_plain, bytes=2 * n,
        )  # fmt: skip
        yield Row(
            name="causal_conv1d_bwd", shape=f"{batch}x{length}x{channels} 4 taps", make=make_bwd,
            ours=lambda dy, x, weight: BACKWARD(
                dy, None, x, weight, None, None, None, True, 4, True, True, False, False
            )[:2],
            torch=gradients_of(_plain), bytes=3 * n,
        )  # fmt: skip
