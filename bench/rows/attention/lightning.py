"""Benchmark rows of ``lightning``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.attention.lightning import BACKWARD, lightning_attention, lightning_attention_step


def _chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Chunks of 256 rows in plain torch."""
    size, (batch, length, heads, width) = 256, q.shape
    i = torch.arange(size, device=q.device)
    rates = decay.view(-1, 1, 1)
    within = torch.exp(-rates * (i.view(-1, 1) - i).clamp(min=0)).tril().to(q.dtype)
    before = torch.exp(-rates * (i.view(-1, 1) + 1)).to(q.dtype)
    after = torch.exp(-rates * (size - 1 - i.view(-1, 1))).to(q.dtype)
    state, parts = q.new_zeros(batch, heads, width, v.shape[-1], dtype=torch.float32), []
    for begin in range(0, length, size):
        qs, ks, vs = (t[:, begin : begin + size].transpose(1, 2) for t in (q, k, v))
        out = (qs @ ks.transpose(-1, -2) * within) @ vs + (qs * before) @ state.to(q.dtype)
        state = torch.exp(-rates * size) * state + (ks * after).transpose(-1, -2) @ vs
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, 1) * width**-0.5


def _backward(dy, q, k, v, decay):
    needs = (False, True, True, True, False)
    return BACKWARD(dy, None, q, k, v, decay, None, None, q.shape[-1] ** -0.5, *needs)[:3]


def _chunked_bwd(dy, q, k, v, decay):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(_chunked(*leaves, decay), leaves, dy)


def rows() -> Iterator[Row]:
    for batch, length, heads in ((2, 4096, 64), (1, 16384, 32)):  # the first one is linghe's

        def make(device: str, generator: torch.Generator, size=(batch, length, heads)) -> dict[str, Any]:
            tensors = {
                name: torch.randn(*size, 128, device=device, generator=generator).bfloat16() for name in ("q", "k", "v")
            }
            return tensors | {"decay": 0.5 ** torch.linspace(1, 8, size[2], device=device)}

        yield Row(
            name="lightning_attention_fwd",
            shape=f"{batch}x{length} {heads} heads of 128",
            make=make,
            ours=lambda q, k, v, decay: lightning_attention(q, k, v, decay),
            torch=_chunked,
            bytes=2 * batch * length * heads * 128 * 4,
        )

        def make_bwd(device: str, generator: torch.Generator, make=make) -> dict[str, Any]:
            given = make(device, generator)
            dy = torch.randn(given["q"].shape, device=device, generator=generator).to(given["q"].dtype)
            return {"dy": dy, **given}

        yield Row(
            name="lightning_attention_bwd",
            shape=f"{batch}x{length} {heads} heads of 128",
            make=make_bwd,
            ours=_backward,
            torch=_chunked_bwd,
            bytes=2 * batch * length * heads * 128 * 7,
        )

    def make_step(device: str, generator: torch.Generator) -> dict[str, Any]:
        tensors = {
            name: torch.randn(64, 32, 128, device=device, generator=generator).bfloat16() for name in ("q", "k", "v")
        }
        return tensors | {"decay": torch.ones(32, device=device), "state": torch.zeros(64, 32, 128, 128, device=device)}

    def plain_step(q, k, v, decay, state):
        row, keys, values = (t.to(state.dtype) for t in (q, k, v))
        state.mul_(torch.exp(-decay).view(-1, 1, 1)).add_(keys.unsqueeze(-1) * values.unsqueeze(-2))
        return state, ((row.unsqueeze(-2) @ state).squeeze(-2) * 128**-0.5).to(q.dtype)

    def exact_step(q, k, v, decay, state):
        """Of the second of two calls: results are compared in memory that the first one has used."""
        given = [t.double() for t in (q, k, v, decay, state)]
        plain_step(*given)
        return plain_step(*given)

    yield Row(
        name="lightning_attention_step",
        shape="64 sequences, 32 heads of 128",
        make=make_step,
        ours=lambda q, k, v, decay, state: (state, lightning_attention_step(q, k, v, decay, state)),
        torch=plain_step,
        exact=exact_step,
        bytes=2 * 4 * 64 * 32 * 128 * 128,
    )
