"""Benchmark rows of ``router_loss``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.router.router_loss_plan import (
    BACKWARD,
    FORWARD,
    SOFTMAX,
    Z,
)


def rows() -> Iterator[Row]:
    tokens, experts, k = 8192, 256, 8
    n = tokens * experts * 4

    def make(device: str, generator: torch.Generator, *, counted: bool, backward: bool) -> dict[str, Any]:
        logits = torch.randn(tokens, experts, device=device, generator=generator)
        inputs: dict[str, Any] = {"dy": torch.ones((), device=device)} if backward else {}
        inputs["logits"] = logits
        if counted:
            uneven = torch.arange(experts, dtype=torch.int32, device=device) * 2  # of equal ones the gradient is 0
            inputs["counts"] = uneven + (tokens * k // experts - experts + 1)
        return inputs

    def z_loss(logits: Tensor) -> Tensor:
        return torch.logsumexp(logits, -1).square().mean()

    def balance(logits: Tensor, counts: Tensor) -> Tensor:
        return experts / (k * tokens) * (torch.softmax(logits, -1).mean(0) * counts).sum()

    def z_loss_bwd(dy: Tensor, logits: Tensor) -> Tensor:
        return dy * 2 / tokens * torch.logsumexp(logits, -1, keepdim=True) * torch.softmax(logits, -1)

    def balance_bwd(dy: Tensor, logits: Tensor, counts: Tensor) -> Tensor:
        s = torch.softmax(logits, -1)
        return dy * factor * s * (counts - (s * counts).sum(-1, keepdim=True))

    factor = experts / (k * tokens * tokens)
    shape = f"{tokens}x{experts}"
    for name, counted, kind, forward, backward in (
        ("z_loss", False, Z, z_loss, z_loss_bwd),
        ("balance_loss", True, SOFTMAX, balance, balance_bwd),
    ):
        yield Row(
            name=f"{name}_fwd",
            shape=shape,
            make=lambda device, g, counted=counted: make(device, g, counted=counted, backward=False),
            ours=lambda logits, counts=None, kind=kind: FORWARD(logits, counts, kind, -1, k, 1.0),
            torch=forward,
            bytes=n + 4,
        )
        yield Row(
            name=f"{name}_bwd",
            shape=shape,
            make=lambda device, g, counted=counted: make(device, g, counted=counted, backward=True),
            ours=lambda dy, logits, counts=None, kind=kind: BACKWARD(dy, logits, counts, kind, -1, k, 1.0),
            torch=backward,
            bytes=2 * n,
        )
