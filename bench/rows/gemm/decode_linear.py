"""Benchmark rows of ``decode_linear``: the four products of a layer with a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.gemm.decode_linear import decode_linear

# Tokens, results, k, with a norm in front, gated. An 8B model's, and those of the action expert of pi0.5.
SIZES = (
    (1, 6144, 4096, True, False), (1, 4096, 4096, False, False), (1, 12288, 4096, True, True),
    (1, 4096, 12288, False, False), (10, 2560, 1024, True, False), (10, 1024, 2048, False, False),
    (10, 4096, 1024, True, True), (10, 1024, 4096, False, False),
)  # fmt: skip
STEPS = ((32, 6144, 4096, True, False), (32, 12288, 4096, True, True), (32, 4096, 12288, False, False))  # a batch of 32


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    """A small call."""
    square = x.new_ones(x.shape[1], x.shape[1])
    return {"decode_linear": lambda: decode_linear(x[:1], square)}


def _inputs(
    device: str, generator: torch.Generator, m: int, n: int, k: int, norm: bool, gated: bool, fp8: bool
) -> dict[str, Any]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    b = random(2 * n if gated else n, k) * k**-0.5
    scale = None
    if fp8:
        b, scale = (b * 16).to(torch.float8_e4m3fn), torch.full((), 1 / 16, device=device)
    add = None if gated or norm else random(m, n)
    return {"a": random(m, k), "b": b, "scale_b": scale, "norm_weight": random(k) if norm else None, "add": add}


def _ours(gated: bool, **inputs: Any) -> Tensor:
    return decode_linear(**inputs, act="silu" if gated else None, gated=gated, constant=True)


def _torch(
    gated: bool, a: Tensor, b: Tensor, scale_b: Tensor | None, norm_weight: Tensor | None, add: Tensor | None
) -> Tensor:
    weight = b if scale_b is None else (b.to(a.dtype) * scale_b.to(a.dtype))
    if norm_weight is not None:
        x = in_fp32(a)
        a = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm_weight).to(a.dtype)
    y = F.linear(a, weight)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if add is None else y + add


def at(m: int, n: int, k: int, norm: bool, gated: bool, fp8: bool = False) -> Row:
    """Return the row of a size."""
    rows = 2 * n if gated else n
    return Row(
        name="decode_linear",
        shape=f"{m}x{n}x{k}{'_norm' * norm}{'_gated' * gated}_{'fp8' if fp8 else 'bf16'}",
        make=partial(_inputs, m=m, n=n, k=k, norm=norm, gated=gated, fp8=fp8),
        ours=partial(_ours, gated),
        torch=partial(_torch, gated),
        bytes=2 * m * k + (1 if fp8 else 2) * rows * k + 2 * m * n * (1 if norm or gated else 2),
    )


def rows() -> Iterator[Row]:
    """Weights of bf16 and of fp8."""
    for sizes in SIZES:
        for fp8 in (False, True):
            yield at(*sizes, fp8)
    yield from (at(*sizes) for sizes in STEPS)
