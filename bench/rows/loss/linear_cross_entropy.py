"""Benchmark rows of ``linear_cross_entropy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.loss.cross_entropy_plan import MEAN
from rtkernels.ops.loss.linear_cross_entropy_operators import FORWARD


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = torch.nn.functional.linear(*leaves)
    loss = torch.nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def _ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    options = (-100, 0.0, 0.0, 0.0, MEAN, False, False, 0, False)
    results = FORWARD(hidden, weight, labels, None, *options, True, True, False)
    return results[0], results[3], results[4]


def rows() -> Iterator[Row]:
    rows, size, vocabulary = 8192, 4096, 151936

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

        labels = torch.randint(0, vocabulary, (rows,), device=device, generator=generator)
        return {"hidden": normal(rows, size), "weight": normal(vocabulary, size) * size**-0.5, "labels": labels}

    yield Row(
        name="linear_cross_entropy",
        shape=f"{rows}x{size}x{vocabulary}",
        make=make,
        ours=_ours,
        torch=_torch,
        bytes=2 * 2 * size * (rows + vocabulary) + 8 * rows,
    )
