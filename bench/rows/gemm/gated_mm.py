"""Benchmark rows of ``gated_mm``: the first half of gated MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.gemm.scaled_mm import _random
from bench.rows.row import Row
from rtkernels.ops.gemm.gated_mm import gated_mm

SIZES = ((4096, 14336, 4096), (8192, 4096, 4096), (64, 14336, 4096), (4096, 2048, 7168))


def _inputs(device: str, generator: torch.Generator, sizes: tuple[int, int, int]) -> dict[str, Any]:
    m, n, k = sizes
    a, b = (_random(device, generator, rows, k).bfloat16() for rows in (m, 2 * n))
    return {"a": a, "b": b * k**-0.5}


def _torch(a: Tensor, b: Tensor) -> Tensor:
    gate, up = (a @ b.t()).chunk(2, -1)
    return F.silu(gate) * up


def at(m: int, n: int, k: int) -> Row:
    """Return the row of a size."""
    return Row(
        name="gated_mm",
        shape=f"{m}x{n}x{k}_bf16",
        make=partial(_inputs, sizes=(m, n, k)),
        ours=gated_mm,
        torch=_torch,
        bytes=2 * (m * k + 2 * n * k + m * n),
        flops=4 * m * n * k,
    )


def rows() -> Iterator[Row]:
    """SiLU, bf16."""
    for sizes in SIZES:
        yield at(*sizes)
