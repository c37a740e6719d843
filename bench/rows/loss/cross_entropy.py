"""Benchmark rows of ``cross_entropy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.loss.cross_entropy_operators import (
    BACKWARD,
    FORWARD,
    ONE_PASS,
)
from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE


def _torch_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(in_fp32(logits), labels, reduction="none")


def _torch_bwd(dy: Tensor, logits: Tensor, labels: Tensor, stats: Tensor) -> Tensor:
    p = torch.softmax(in_fp32(logits), -1)
    p = p - torch.nn.functional.one_hot(labels, logits.shape[-1])
    return (p * in_fp32(dy).unsqueeze(-1)).to(logits.dtype)


def _torch_both(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(in_fp32(leaf), labels)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def at(rows: int, cols: int) -> Iterator[Row]:
    """Yield forward, backward and both in one call, of logits of a size."""
    n = rows * cols * 2

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        logits = torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)
        return {"logits": logits, "labels": torch.randint(0, cols, (rows,), device=device, generator=generator)}

    def make_bwd(device: str, generator: torch.Generator) -> dict[str, Any]:
        inputs = make(device, generator)
        dy = torch.randn(rows, device=device, generator=generator)
        stats = FORWARD(inputs["logits"], inputs["labels"], -100, 0.0, 0.0, 0.0, NONE, False)[2]
        return {"dy": dy, **inputs, "stats": stats}

    shape = f"{rows}x{cols}"
    yield Row(
        name="cross_entropy_fwd",
        shape=shape,
        make=make,
        ours=lambda logits, labels: FORWARD(logits, labels, -100, 0.0, 0.0, 0.0, NONE, False)[0],
        torch=_torch_rows,
        fused=lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels, reduction="none"),
        bytes=n + rows * (8 + 12),
    )
    yield Row(
        name="cross_entropy_bwd",
        shape=shape,
        make=make_bwd,
        ours=lambda dy, logits, labels, stats: BACKWARD(
            dy, logits, labels, stats, None, -100, 0.0, 0.0, 0.0, 0, logits.shape[-1]
        ),
        torch=_torch_bwd,
        bytes=2 * n + rows * (8 + 12),
    )
    yield Row(
        name="cross_entropy_fwdbwd",
        shape=shape,
        make=make,
        ours=lambda logits, labels: ONE_PASS(logits, labels, -100, 0.0, 0.0, 0.0, MEAN, False)[::3],
        torch=_torch_both,
        bytes=2 * n + rows * 8,
    )


def rows() -> Iterator[Row]:
    yield from at(8192, 157184)
