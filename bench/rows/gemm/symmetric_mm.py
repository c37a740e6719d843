"""Benchmark rows of symmetric products, at the matrices of an 8 B model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row

_SIZES = ((1, 4096, 4096), (4, 4096, 4096), (4, 4096, 12288), (8, 1024, 4096), (4, 2048, 7168))


def _make(batch: int, n: int, k: int):
    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"a": torch.randn(batch, n, k, dtype=torch.bfloat16, device=device, generator=generator)}

    return make


def _ours(a: Tensor) -> Tensor:
    from rtkernels.ops.gemm.symmetric_mm import SYMMETRIC_MM

    return SYMMETRIC_MM(a, None, None, 1.0, 0.0, 0.0)


def rows() -> Iterator[Row]:
    """Yield the rows. Operations are those of the whole product: twice what is computed."""
    for batch, n, k in _SIZES:
        yield Row(
            name="symmetric_mm", shape=f"{batch}x{n}x{k}", make=_make(batch, n, k), ours=_ours,
            torch=lambda a: torch.bmm(a, a.mT), bytes=2 * batch * n * (n + k), flops=2 * batch * n * n * k,
        )  # fmt: skip
