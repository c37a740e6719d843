"""Benchmark rows of ``divergence``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.loss.divergence_operators import BOTH
from rtkernels.ops.loss.divergence_plan import (
    BY_ROWS,
    LOGARITHM,
    MIXED,
)


def rows() -> Iterator[Row]:
    rows, cols = 8192, 32768
    n = rows * cols * 2

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        def logs() -> Tensor:
            x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)
            return torch.log_softmax(x, -1)

        return {"x": logs(), "target": logs()}

    def both(mode: int, beta: float):
        def ours(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            total, dx = BOTH(x, target, None, -100, mode, beta, 1.0, BY_ROWS)
            return total[0], dx

        def plain(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            math_dtype = torch.promote_types(x.dtype, torch.float32)
            a, b = x.to(math_dtype), target.to(math_dtype)
            p = b.exp()
            if mode == LOGARITHM:
                return (p * (b - a)).sum() / x.shape[0], (-p / x.shape[0]).to(x.dtype)
            q = a.exp()
            m = (beta * p + (1 - beta) * q).log()
            dx = (1 - beta) * q * (a - m)
            return (beta * p * (b - m) + dx).sum() / x.shape[0], (dx / x.shape[0]).to(x.dtype)

        return ours, plain

    # The gradient of the one needs the target alone: two tensors in, one out, and at the least each is moved once.
    for name, mode, beta in (("kl_div", LOGARITHM, 0.0), ("jsd", MIXED, 0.5)):
        ours, plain = both(mode, beta)
        yield Row(name=name, shape=f"{rows}x{cols}", make=make, ours=ours, torch=plain, bytes=3 * n)
