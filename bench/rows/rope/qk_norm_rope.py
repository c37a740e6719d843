"""Benchmark rows of qk_norm_rope, and its math in plain torch for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.rope.qk_norm_rope import BACKWARD, FORWARD


def _torch_fwd(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, tables: tuple[Tensor, Tensor], q_heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    math_dtype = torch.promote_types(qkv.dtype, torch.float32)
    length, batch = qkv.shape[:2]
    dim, group = q_weight.shape[0], q_heads // kv_heads
    cos, sin = (t.to(math_dtype).view(length, 1, 1, -1) for t in tables)
    half = cos.shape[-1]
    q, k, v = qkv.view(length, batch, kv_heads, group + 2, dim).split((group, 1, 1), 3)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        h = x.reshape(length, batch, -1, dim).to(math_dtype)
        n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.to(math_dtype)
        a, b, rest = n.split((half, half, dim - 2 * half), -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        return y.to(x.dtype).transpose(0, 1).contiguous()

    return normed(q, q_weight), normed(k, k_weight), v.squeeze(3).transpose(0, 1).contiguous()


def _torch_bwd(dy: tuple[Tensor, ...], qkv: Tensor, q_weight: Tensor, k_weight: Tensor, tables, q_heads, kv_heads):
    math_dtype = torch.promote_types(qkv.dtype, torch.float32)
    length, batch = qkv.shape[:2]
    dim, group = q_weight.shape[0], q_heads // kv_heads
    cos, sin = (t.to(math_dtype).view(length, 1, 1, -1) for t in tables)
    half = cos.shape[-1]
    parts = qkv.view(length, batch, kv_heads, group + 2, dim).split((group, 1, 1), 3)
    found, dweights = [], []
    for x, weight, d in zip(parts[:2], (q_weight, k_weight), dy[:2], strict=True):
        h = x.reshape(length, batch, -1, dim).to(math_dtype)
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        a, b, rest = d.to(math_dtype).transpose(0, 1).split((half, half, dim - 2 * half), -1)
        a = torch.cat((a * cos + b * sin, b * cos - a * sin, rest), -1)
        g = a * weight.to(math_dtype)
        dx = rstd * g - h * rstd**3 * (g * h).mean(-1, keepdim=True)
        found.append(dx.to(qkv.dtype).view(x.shape))
        dweights.append((a * h * rstd).sum((0, 1, 2)))
    found.append(dy[2].to(qkv.dtype).transpose(0, 1).unsqueeze(3))
    return torch.cat(found, 3).view(qkv.shape), torch.stack(dweights).to(q_weight.dtype)


# q and kv heads, head size. Half of a head is rotated: the halves of 72, 80 and 112 end inside of 16 bytes.
_SHAPES = ((32, 4, 128), (32, 8, 128), *((32, 8, dim) for dim in (32, 64, 72, 80, 112, 192, 256)))


def pair(length: int, batch: int, q_heads: int, kv_heads: int, dim: int) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size."""
    heads = q_heads + 2 * kv_heads
    n, table, rotary = 2 * length * batch * dim, 2 * length * dim, dim // 2

    def make(device: str, g: torch.Generator, *, backward: bool) -> dict[str, Any]:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device, generator=g)

        place = torch.arange(length, device=device, dtype=torch.float32)
        angle = torch.outer(place, 10000.0 ** -(torch.arange(0, rotary, 2, device=device) / rotary))
        inputs = {
            "qkv": normal(length, batch, heads * dim),
            "q_weight": normal(dim),
            "k_weight": normal(dim),
            "tables": (angle.cos(), angle.sin()),
            "q_heads": q_heads,
            "kv_heads": kv_heads,
        }
        if not backward:
            return inputs
        return {"dy": tuple(normal(batch, length, h, dim) for h in (q_heads, kv_heads, kv_heads)), **inputs}

    def forward(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, tables: Any, q_heads: int, kv_heads: int):
        options = (q_heads, kv_heads, True, "sbhd", 2 * tables[0].shape[-1], 0, False, 1e-6, 0.0)
        return FORWARD(qkv, q_weight, k_weight, *options, *tables, None, None, "", 0, 1, 1.0)

    def backward(dy, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, tables: Any, q_heads: int, kv_heads: int):
        options = (q_heads, kv_heads, True, "sbhd", 2 * tables[0].shape[-1], 0, False, 1e-6, 0.0, True)
        return BACKWARD(*dy, qkv, q_weight, k_weight, *options, *tables, None, None, "", 0, 1, 1.0)

    shape = f"s{length}b{batch}q{q_heads}kv{kv_heads}d{dim}"
    forward_row = Row(
        name="qk_norm_rope_fwd",
        shape=shape,
        make=lambda device, g: make(device, g, backward=False),
        ours=forward,
        torch=_torch_fwd,
        bytes=2 * n * heads + table,
    )
    backward_row = Row(
        name="qk_norm_rope_bwd",
        shape=shape,
        make=lambda device, g: make(device, g, backward=True),
        ours=backward,
        torch=_torch_bwd,
        bytes=2 * n * heads + n * (heads - kv_heads) + table,
    )
    return forward_row, backward_row


def rows() -> Iterator[Row]:
    """Yield the benchmark rows."""
    for q_heads, kv_heads, dim in _SHAPES:
        yield from pair(4096, 2, q_heads, kv_heads, dim)
