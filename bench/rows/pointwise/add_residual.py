"""Benchmark rows of ``add_residual`` and ``euler_step``, at the sizes of policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.pointwise.add_residual import add_residual
from rtkernels.ops.pointwise.euler_step import euler_step


def rows() -> Iterator[Row]:
    for count, cols in ((10, 1024), (968, 2048), (8192, 4096)):

        def make(device: str, generator: torch.Generator, count: int = count, cols: int = cols) -> dict[str, Any]:
            def normal() -> Tensor:
                return torch.randn(count, cols, dtype=torch.bfloat16, device=device, generator=generator)

            return {"residual": normal(), "x": normal(), "gate": normal()}

        yield Row(
            name="add_residual_gate", shape=f"{count}x{cols}", make=make,
            ours=lambda residual, x, gate: add_residual(residual, x, gate=gate),
            torch=lambda residual, x, gate: residual + x * gate, bytes=8 * count * cols,
        )  # fmt: skip
    yield Row(
        name="euler_step", shape="10x32 fp32 += bf16",
        make=lambda device, g: {
            "x": torch.randn(10, 32, device=device, generator=g),
            "v": torch.randn(10, 32, dtype=torch.bfloat16, device=device, generator=g),
        },
        ours=lambda x, v: euler_step(x, v, -0.1), torch=lambda x, v: x - 0.1 * v, bytes=10 * 320,
    )  # fmt: skip
