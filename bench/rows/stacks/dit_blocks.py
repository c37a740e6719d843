"""Benchmark rows of diffusion transformers: modulated norms, normalised and rotated heads, a GELU MLP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from bench.rows.row import Row, in_fp32

# Blocks, tokens, heads, width of a head, inner width: of a video model (Wan 1.3B, 480p, a third of a second), and of an
# audio model (Stable Audio Open, 11 s).
SIZES = {"video": (4, 4680, 12, 128, 8960), "audio": (8, 1024, 24, 64, 6144)}


def _inputs(device: str, generator: torch.Generator, size: tuple[int, int, int, int, int]) -> dict[str, Any]:
    blocks, tokens, heads, width, inner = size
    hidden = heads * width

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(*shape, device=device, generator=generator)).bfloat16()

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return random(blocks, rows, columns, gain=columns**-0.5), random(blocks, rows, gain=0.1)

    named: dict[str, Any] = {"x": random(tokens, hidden), "modulation": random(blocks, 6, hidden, gain=0.3)}
    for name, rows, columns in (
        ("qkv", 3 * hidden, hidden), ("out", hidden, hidden), ("up", inner, hidden), ("down", hidden, inner),
    ):  # fmt: skip
        named[name], named[f"{name}_bias"] = matrix(rows, columns)
    named["q_norm"], named["k_norm"] = (1 + random(blocks, width, gain=0.1) for _ in range(2))
    named["cos"], named["sin"] = rtkernels.rope_table(tokens, width, device=device)
    return named


def _ours(
    x: Tensor, modulation: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, **w: Tensor
) -> Tensor:
    tokens, hidden = x.shape
    heads = hidden // q_norm.shape[1]
    h, gate = None, None
    for i in range(len(modulation)):
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation[i]
        options = {} if h is None else {"residual": h, "gate": gate}
        y = rtkernels.layer_norm(x, eps=1e-6, scale=scale1, shift=shift1, **options)
        y, h = (y, x) if h is None else y[:2]
        qkv = rtkernels.scaled_mm(y, w["qkv"][i], bias=w["qkv_bias"][i])
        q, k, v = rtkernels.qkv_split(
            qkv[None], heads, heads, rope=(cos, sin), q_norm=q_norm[i], k_norm=k_norm[i], eps=1e-6
        )
        x = rtkernels.scaled_mm(rtkernels.attention(q, k, v).view(tokens, hidden), w["out"][i], bias=w["out_bias"][i])
        y, h = rtkernels.layer_norm(x, eps=1e-6, scale=scale2, shift=shift2, residual=h, gate=gate1)[:2]
        y = rtkernels.scaled_mm(y, w["up"][i], bias=w["up_bias"][i], act="gelu_tanh")
        x, gate = rtkernels.scaled_mm(y, w["down"][i], bias=w["down_bias"][i]), gate2
    return rtkernels.add_residual(h, x, gate=gate)


def _torch(
    x: Tensor, modulation: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, **w: Tensor
) -> Tensor:
    tokens, hidden = x.shape
    width = q_norm.shape[1]

    def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = F.layer_norm(in_fp32(x), (hidden,), eps=1e-6)
        return (y * (1 + in_fp32(scale)) + in_fp32(shift)).to(x.dtype)

    def head(t: Tensor, weight: Tensor) -> Tensor:
        t = in_fp32(t)
        t = t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * in_fp32(weight)
        low, high = t.chunk(2, -1)
        c, s = cos[:, None].to(t.dtype), sin[:, None].to(t.dtype)
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype).transpose(0, 1)

    for i in range(len(modulation)):
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation[i]
        q, k, v = (
            F.linear(modulated(x, scale1, shift1), w["qkv"][i], w["qkv_bias"][i]).view(tokens, 3, -1, width).unbind(1)
        )
        q, k = head(q, q_norm[i]), head(k, k_norm[i])
        y = F.scaled_dot_product_attention(q[None], k[None], v.transpose(0, 1)[None])[0].transpose(0, 1)
        x = x + gate1 * F.linear(y.reshape(tokens, hidden), w["out"][i], w["out_bias"][i])
        y = F.gelu(F.linear(modulated(x, scale2, shift2), w["up"][i], w["up_bias"][i]), approximate="tanh")
        x = x + gate2 * F.linear(y, w["down"][i], w["down_bias"][i])
    return x


def at(kind: str, size: tuple[int, int, int, int, int]) -> Row:
    """Return the row of a size."""
    blocks, tokens, heads, width, inner = size
    hidden = heads * width
    weights = blocks * (4 * hidden * hidden + 2 * hidden * inner)
    return Row(
        name="dit_blocks",
        shape=f"{kind}_{blocks}x{tokens}x{hidden}_bf16",
        make=partial(_inputs, size=size),
        ours=_ours,
        torch=_torch,
        bytes=2 * (weights + 2 * tokens * hidden),
        flops=2 * tokens * weights + 4 * blocks * heads * width * tokens**2,
    )


def rows() -> Iterator[Row]:
    """A video and an audio model, inference in bf16."""
    for kind, size in SIZES.items():
        yield at(kind, size)
