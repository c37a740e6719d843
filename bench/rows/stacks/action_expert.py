"""Benchmark rows of a policy: one denoising step of an action expert (pi0.5's), which reads the keys of its prefix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from bench.rows.row import Row, in_fp32

LAYERS, WIDTH, INNER, HEADS, HEAD, PREFIX = 18, 1024, 4096, 8, 256, 968
MATRICES = {
    "qkv": ((HEADS + 2) * HEAD, WIDTH), "out": (WIDTH, HEADS * HEAD), "gate_up": (2 * INNER, WIDTH),
    "down": (WIDTH, INNER),
}  # fmt: skip


def _inputs(device: str, generator: torch.Generator, tokens: int, fp8: bool, layers: int = LAYERS) -> dict[str, Any]:
    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(*shape, device=device, generator=generator)).bfloat16()

    named: dict[str, Any] = {
        "x": random(tokens, WIDTH),
        "styles": random(layers, 2, 3, WIDTH, gain=0.3),  # scale, shift, gate
        "cache": random(layers, 2, 1, PREFIX + tokens, 1, HEAD),
    }
    named["cos"], named["sin"] = rtkernels.rope_table(PREFIX + tokens, HEAD, device=device)
    for name, (rows, columns) in MATRICES.items():
        weight = random(layers, rows, columns, gain=columns**-0.5)
        if fp8:
            codes = (weight * 16).to(torch.float8_e4m3fn)
            named[f"{name}_codes"], weight = codes, codes.bfloat16() / 16
        named[name] = weight
    _, shifts, gates = named["styles"].float().unbind(2)
    factor = 1 / 16 if fp8 else 1.0
    named["factor"] = torch.full((), factor, device=device)
    # What depends on the step only is computed once, as examples/vla_policy.py does.
    named["qkv_bias"], named["gate_up_bias"] = (
        (named[name].float() @ shifts[:, i, :, None]).squeeze(-1) for i, name in enumerate(("qkv", "gate_up"))
    )
    named["gates"] = (gates * factor).contiguous()
    return named


def _ours(fp8: bool, x: Tensor, styles: Tensor, cache: Tensor, cos: Tensor, sin: Tensor, **w: Any) -> Tensor:
    def linear(x: Tensor, name: str, i: int, scale: Tensor | None, **options: Any) -> Tensor:
        weight = w[f"{name}_codes"][i] if fp8 else w[name][i]
        return rtkernels.decode_linear(x, weight, scale, constant=True, **options)

    tokens, factor = len(x), w["factor"] if fp8 else None
    for i in range(len(styles)):
        (scale1, _, _), (scale2, _, _) = styles[i]
        qkv = linear(x, "qkv", i, factor, norm_weight=scale1, offset=1.0, bias=w["qkv_bias"][i])
        k, v = cache[i]
        y = rtkernels.chunk_attention(qkv[None], k, v, (cos, sin), prefix=PREFIX, constant=True).view(tokens, -1)
        x = linear(y, "out", i, w["gates"][i, 0], add=x)
        y = linear(
            x,
            "gate_up",
            i,
            factor,
            norm_weight=scale2,
            offset=1.0,
            bias=w["gate_up_bias"][i],
            act="gelu_tanh",
            gated=True,
        )
        x = linear(y, "down", i, w["gates"][i, 1], add=x)
    return x


def _torch(x: Tensor, styles: Tensor, cache: Tensor, cos: Tensor, sin: Tensor, **w: Any) -> Tensor:
    tokens = len(x)

    def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = in_fp32(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + in_fp32(scale)) + in_fp32(shift)).to(x.dtype)

    def rotated(t: Tensor) -> Tensor:
        low, high = in_fp32(t).chunk(2, -1)
        c, s = (table[PREFIX : PREFIX + tokens, None].to(low.dtype) for table in (cos, sin))
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype)

    for i in range(len(styles)):
        (scale1, shift1, gate1), (scale2, shift2, gate2) = styles[i]
        qkv = F.linear(modulated(x, scale1, shift1), w["qkv"][i]).view(tokens, HEADS + 2, HEAD)
        q, k, v = rotated(qkv[:, :HEADS]), rotated(qkv[:, HEADS:-1]), qkv[:, -1:]
        keys, values = (
            torch.cat([old[0, :PREFIX], new]).transpose(0, 1) for old, new in zip(cache[i], (k, v), strict=True)
        )
        y = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], enable_gqa=True)[0]
        x = x + gate1 * F.linear(y.transpose(0, 1).reshape(tokens, -1), w["out"][i])
        gate, up = F.linear(modulated(x, scale2, shift2), w["gate_up"][i]).chunk(2, -1)
        x = x + gate2 * F.linear(F.gelu(gate, approximate="tanh") * up, w["down"][i])
    return x


def at(tokens: int, fp8: bool) -> Row:
    """Return the row of a number of action tokens."""
    weights = LAYERS * sum(rows * columns for rows, columns in MATRICES.values())
    return Row(
        name="action_expert",
        shape=f"{LAYERS}x{tokens}x{WIDTH}_{'fp8' if fp8 else 'bf16'}",
        make=partial(_inputs, tokens=tokens, fp8=fp8),
        ours=partial(_ours, fp8),
        torch=_torch,
        bytes=(1 if fp8 else 2) * weights + LAYERS * (PREFIX + tokens) * 4 * HEAD,
    )


def rows() -> Iterator[Row]:
    """Ten action tokens; weights of bf16 and of fp8."""
    for fp8 in (False, True):
        yield at(10, fp8)
