"""Benchmark rows of ``fp8_linear``: result and both gradients, quantisation included; bf16 for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.gemm.fp8_linear import fp8_linear

# Tokens, columns and rows of the weight: projections of layers with hidden size 4096 and 8192.
SIZES = ((8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096), (4096, 8192, 28672))


def _gradients(y: Tensor, dy: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def _ours(x: Tensor, weight: Tensor, dy: Tensor, recipe: str) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return _gradients(fp8_linear(x, weight, recipe=recipe), dy, x, weight)


def _torch(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return _gradients(torch.nn.functional.linear(x, weight), dy, x, weight)


def rows() -> Iterator[Row]:
    """Yield the rows; the error against fp64 is the noise of fp8, about 0.037."""
    for tokens, k, n in SIZES:

        def make(
            device: str, generator: torch.Generator, tokens: int = tokens, k: int = k, n: int = n
        ) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            return {"x": normal(tokens, k), "weight": normal(n, k) * k**-0.5, "dy": normal(tokens, n)}

        for recipe in ("block", "row", "tensor"):
            yield Row(
                name=f"fp8_linear_{recipe}",
                shape=f"{tokens}x{k}x{n}",
                make=make,
                ours=partial(_ours, recipe=recipe),
                torch=_torch,
                bytes=4 * (tokens * k + k * n + tokens * n),
            )
