"""Benchmark rows of training at a level of ``batch_invariant``: forward and backward of layers of an 8B model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from bench.rows.row import Row, in_fp32

LAYERS, SEQUENCES, TOKENS = 2, 2, 4096
WIDTH, INNER, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128  # Llama 3 8B
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), "out": (WIDTH, HEADS * HEAD), "gate_up": (2 * INNER, WIDTH),
    "down": (WIDTH, INNER),
}  # fmt: skip


def _inputs(device: str, generator: torch.Generator) -> dict[str, Any]:
    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(*shape, device=device, generator=generator)).bfloat16()

    named: dict[str, Any] = {"x": random(SEQUENCES, TOKENS, WIDTH), "dy": random(SEQUENCES, TOKENS, WIDTH)}
    named["cos"], named["sin"] = rtkernels.rope_table(TOKENS, HEAD, device=device)
    for i in range(LAYERS):
        named |= {f"norm{n}_{i}": 1 + random(WIDTH, gain=0.1) for n in (1, 2)}
        named |= {f"{name}_{i}": random(*shape, gain=shape[1] ** -0.5) for name, shape in MATRICES.items()}
    return named


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    full = in_fp32(x)
    return (full * (full.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).to(x.dtype)


def _plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = in_fp32(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def _plain_glu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


PLAIN = (_plain_norm, _plain_rope, _plain_attention, _plain_glu)
OURS = (rtkernels.rms_norm, rtkernels.rope, partial(rtkernels.attention, causal=True), rtkernels.glu)


def _step(
    functions: tuple[Callable[..., Tensor], ...], x: Tensor, dy: Tensor, cos: Tensor, sin: Tensor, **given: Tensor
) -> tuple[Tensor, ...]:
    """Return the result, then the gradients of x and of all weights."""
    norm, rope, attention, glu = functions
    leaf, w = x.detach().requires_grad_(), {name: t.detach().requires_grad_() for name, t in given.items()}
    y = leaf
    for i in range(sum(name.startswith("qkv") for name in w)):
        qkv = F.linear(norm(y, w[f"norm1_{i}"]), w[f"qkv_{i}"]).unflatten(-1, (-1, HEAD))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), -2)
        attended = attention(rope(q, cos, sin), rope(k, cos, sin), v)
        y = y + F.linear(attended.flatten(-2), w[f"out_{i}"])
        y = y + F.linear(glu(F.linear(norm(y, w[f"norm2_{i}"]), w[f"gate_up_{i}"])), w[f"down_{i}"])
    return y.detach(), *torch.autograd.grad(y, (leaf, *w.values()), dy)


def _at_level(**given: Tensor) -> tuple[Tensor, ...]:
    with rtkernels.batch_invariant(2):
        return _step(OURS, **given)


def rows() -> Iterator[Row]:
    weights = LAYERS * (sum(a * b for a, b in MATRICES.values()) + 2 * WIDTH)
    tokens = SEQUENCES * TOKENS
    products = 6 * tokens * LAYERS * sum(a * b for a, b in MATRICES.values())
    attention = LAYERS * 7 * SEQUENCES * TOKENS * TOKENS * HEADS * HEAD  # causal: half of 4 forward, 10 backward
    yield Row(
        name="invariant_step", shape=f"{LAYERS} layers of 8B, {SEQUENCES}x{TOKENS}", make=_inputs, ours=_at_level,
        torch=partial(_step, PLAIN), bytes=4 * weights + 8 * tokens * WIDTH, flops=products + attention,
        backends={"default": lambda **given: partial(_step, OURS, **given)},
    )  # fmt: skip
