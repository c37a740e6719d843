"""Benchmark rows of ``nonzero_mv``: a tenth of the rows counts, as in RWKV's channel mixing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import rtkernels
from bench.rows.row import Row


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {"nonzero_mv": lambda: rtkernels.nonzero_mv(x[:, 0], x)}


def rows() -> Iterator[Row]:
    n, m = 16384, 4096

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        k = torch.randn(n, dtype=torch.bfloat16, device=device, generator=generator)
        v = torch.randn(n, m, dtype=torch.bfloat16, device=device, generator=generator)
        return {"k": (k - 1.28).relu(), "v": v}

    yield Row(
        name="nonzero_mv", shape=f"{n}x{m}", make=make, ours=lambda k, v: rtkernels.nonzero_mv(k, v),
        torch=lambda k, v: k @ v, bytes=2 * n * m // 10,
    )  # fmt: skip
