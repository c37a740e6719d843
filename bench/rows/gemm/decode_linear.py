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
from rtkernels.ops.quant import pack

# Tokens, results, k, with a norm in front, gated. An 8B model's, and those of the action expert of pi0.5.
SIZES = (
    (1, 6144, 4096, True, False), (1, 4096, 4096, False, False), (1, 12288, 4096, True, True),
    (1, 4096, 12288, False, False), (10, 2560, 1024, True, False), (10, 1024, 2048, False, False),
    (10, 4096, 1024, True, True), (10, 1024, 4096, False, False),
)  # fmt: skip
STEPS = ((32, 6144, 4096, True, False), (32, 12288, 4096, True, True), (32, 4096, 12288, False, False))  # a batch of 32
# More tokens and weights of every format: layers of a 0.9B model and of an 8B model.
MANY = tuple(
    (m, *layer) for m in (16, 32, 64) for layer in ((4608, 1536, True, True), (4096, 14336, False, False))
)  # fmt: skip
_BYTES = {"bf16": 2, "fp8": 1, "int4": 0.5, "nvfp4": 0.5}  # of a weight, without scales


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    """A small call."""
    square = x.new_ones(x.shape[1], x.shape[1])
    return {"decode_linear": lambda: decode_linear(x[:1], square)}


def _inputs(
    device: str, generator: torch.Generator, m: int, n: int, k: int, norm: bool, gated: bool, kind: str
) -> dict[str, Any]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    b = random(2 * n if gated else n, k) * k**-0.5
    scale = whole = None
    if kind == "fp8":
        b, scale = (b * 16).to(torch.float8_e4m3fn), torch.full((), 1 / 16, device=device)
    elif kind == "int4":
        b, scale = pack.quantize_int4(b, 128)
    elif kind == "nvfp4":
        b, scale, whole = pack.quantize_nvfp4(b.float())
    add = None if gated or norm else random(m, n)
    given = {"a": random(m, k), "b": b, "scale_b": scale, "norm_weight": random(k) if norm else None}
    return {**given, "add": add, "global_scale": whole}


def _ours(gated: bool, packed: str | None, **inputs: Any) -> Tensor:
    return decode_linear(**inputs, act="silu" if gated else None, gated=gated, constant=True, packed=packed)


def _torch(
    gated: bool, packed: str | None, a: Tensor, b: Tensor, scale_b: Tensor | None, norm_weight: Tensor | None,
    add: Tensor | None, global_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    if packed is not None:
        b = pack.nibble_values(b, packed, a.dtype)
        scale_b = scale_b.to(a.dtype).repeat_interleave(b.shape[1] // scale_b.shape[1], 1)
    if global_scale is not None:
        scale_b = scale_b * global_scale.to(a.dtype)
    weight = b if scale_b is None else (b.to(a.dtype) * scale_b.to(a.dtype))
    if norm_weight is not None:
        x = in_fp32(a)
        a = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm_weight).to(a.dtype)
    y = F.linear(a, weight)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if add is None else y + add


def at(m: int, n: int, k: int, norm: bool, gated: bool, kind: str = "bf16") -> Row:
    """Return the row of a size."""
    rows = 2 * n if gated else n
    packed = {"int4": "int4", "nvfp4": "e2m1"}.get(kind)
    scales = {"int4": rows * k // 32, "nvfp4": rows * k // 16}.get(kind, 0)
    return Row(
        name="decode_linear",
        shape=f"{m}x{n}x{k}{'_norm' * norm}{'_gated' * gated}_{kind}",
        make=partial(_inputs, m=m, n=n, k=k, norm=norm, gated=gated, kind=kind),
        ours=partial(_ours, gated, packed),
        torch=partial(_torch, gated, packed),
        bytes=2 * m * k + int(_BYTES[kind] * rows * k) + scales + 2 * m * n * (1 if norm or gated else 2),
    )


def rows() -> Iterator[Row]:
    """Weights of bf16 and of fp8; of 4 bits, too, where there are more tokens."""
    for sizes in SIZES:
        for kind in ("bf16", "fp8"):
            yield at(*sizes, kind)
    for sizes in STEPS:
        yield at(*sizes, "bf16")
    for sizes in MANY:
        for kind in _BYTES:
            yield at(*sizes, kind)
