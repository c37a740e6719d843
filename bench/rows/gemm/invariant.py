"""Benchmark rows of ``batch_invariant``: products and decoding at a level, beside the same calls without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import rtkernels
from bench.rows.attention import decode
from bench.rows.row import Row

_SHAPES = (
    *((m, 4096, 4096) for m in (1, 8, 32, 128, 512, 2048, 8192)), (1, 28672, 4096), (32, 28672, 4096),
    (1, 4096, 14336), (32, 4096, 14336), (8192, 28672, 4096),
)  # fmt: skip
_BATCHES = (1, 8, 32, 128)


def _at_level(call: Callable[..., Any], level: int) -> Callable[..., Any]:
    def leveled(**given: Any) -> Any:
        with rtkernels.batch_invariant(level):
            return call(**given)

    return leveled


def _default(call: Callable[..., Any]) -> dict[str, Callable[..., Callable[[], Any]]]:
    return {"default": lambda **given: lambda: call(**given)}


def _product(a: Tensor, b: Tensor) -> Tensor:
    return rtkernels.scaled_mm(a, b, b_layout="nk")


def _gradient(dy: Tensor, x: Tensor, total: Tensor) -> Tensor:
    return rtkernels.scaled_mm(dy.t(), x, out=total, accumulate=True, b_layout="kn")


def rows() -> Iterator[Row]:
    for m, n, k in _SHAPES:

        def make(device: str, generator: torch.Generator, m: int = m, n: int = n, k: int = k) -> dict[str, Any]:
            a, b = (torch.randn(rows, k, device=device, generator=generator).bfloat16() for rows in (m, n))
            return {"a": a, "b": b}

        yield Row(
            name="invariant_mm", shape=f"{m}x{n}x{k}", make=make, ours=_at_level(_product, 1),
            torch=lambda a, b: a @ b.t(), bytes=2 * (m * k + n * k + m * n), flops=2 * m * n * k,
            backends=_default(_product),
        )  # fmt: skip
    for rows_of_batch, n, k in ((8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336)):

        def make_gradient(
            device: str, generator: torch.Generator, m: int = rows_of_batch, n: int = n, k: int = k
        ) -> dict[str, Any]:
            dy, x = (torch.randn(m, cols, device=device, generator=generator).bfloat16() for cols in (n, k))
            return {"dy": dy, "x": x, "total": torch.zeros(n, k, device=device)}

        yield Row(
            name="invariant_wgrad", shape=f"{rows_of_batch}x{n}x{k}", make=make_gradient, ours=_at_level(_gradient, 3),
            torch=lambda dy, x, total: total.add_((dy.t() @ x).to(total.dtype)),
            exact=lambda dy, x, total: 2 * (dy.double().t() @ x.double()),  # of the second of two calls
            bytes=2 * rows_of_batch * (n + k) + 8 * n * k, flops=2 * rows_of_batch * n * k,
            backends=_default(_gradient),
        )  # fmt: skip
    for batch in _BATCHES:
        row = decode.at(batch, 1024, 32, 8, 128, torch.bfloat16, 64)
        yield Row(
            name="invariant_decode", shape=row.shape, make=row.make, ours=_at_level(row.ours, 1), torch=row.torch,
            bytes=row.bytes, backends=_default(row.ours),
        )  # fmt: skip
