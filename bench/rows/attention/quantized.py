"""Benchmark rows of ``quantized``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.row import Row
from rtkernels.ops.attention.quantize_heads import quantize_qk, quantize_v
from rtkernels.ops.attention.quantized import attention_quantized

_BATCH, _HEADS, _QUERIES, _KEYS, _WIDTH = 4, 8, 4096, 8192, 128  # gn_kernels' benchmark
_KINDS = (
    (torch.int8, None), (torch.int8, torch.int8), (torch.int8, torch.float8_e4m3fn), (torch.float8_e4m3fn, None),
)  # fmt: skip


def _inputs(device: str, generator: torch.Generator) -> list[torch.Tensor]:
    shapes = ((_BATCH, rows, _HEADS, _WIDTH) for rows in (_QUERIES, _KEYS, _KEYS))
    return [(torch.randn(shape, device=device, generator=generator) + 0.5).bfloat16() for shape in shapes]


def _plain(q16: torch.Tensor, k16: torch.Tensor, v16: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q16, k16, v16))).transpose(1, 2)


def rows() -> Iterator[Row]:
    for code, value_code in _KINDS:

        def make(device: str, generator: torch.Generator, kind=(code, value_code)) -> dict[str, Any]:
            q, k, v = _inputs(device, generator)
            qc, qs, kc, ks, _ = quantize_qk(q, k, dtype=kind[0])
            values, scales = (v, None) if kind[1] is None else quantize_v(v, dtype=kind[1])
            return {"q16": q, "k16": k, "v16": v, "q": qc, "k": kc, "v": values, "sq": qs, "sk": ks, "sv": scales}

        names = [str(d).removeprefix("torch.") for d in (code, value_code or torch.bfloat16)]
        bytes_of_v = 2 if value_code is None else 1
        yield Row(
            name="attention_quantized",
            shape=f"{_BATCH}x{_QUERIES} by {_KEYS} keys, {_HEADS} heads of {_WIDTH}, {names[0]} and {names[1]}",
            make=make,
            ours=lambda q, k, v, sq, sk, sv, **_: attention_quantized(q, k, v, sq, sk, sv),
            torch=_plain,
            bytes=_BATCH * _HEADS * _WIDTH * (3 * _QUERIES + (1 + bytes_of_v) * _KEYS),
            flops=4 * _BATCH * _HEADS * _QUERIES * _KEYS * _WIDTH,
        )

    def make_16(device: str, generator: torch.Generator) -> dict[str, Any]:
        return dict(zip(("q", "k"), _inputs(device, generator), strict=False))

    def plain_codes(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = k - k.mean(1, keepdim=True)
        results = []
        for t in (q, k):
            scale = t.abs().amax(-1, keepdim=True).float() / 127
            results += [(t / scale).round().to(torch.int8), scale.squeeze(-1).transpose(1, 2)]
        return tuple(results)

    yield Row(
        name="quantize_qk",
        shape=f"{_BATCH}x{_QUERIES} and {_KEYS} rows, {_HEADS} heads of {_WIDTH}",
        make=make_16,
        ours=lambda q, k: quantize_qk(q, k),
        torch=plain_codes,
        bytes=_BATCH * _HEADS * _WIDTH * 3 * (_QUERIES + _KEYS),
    )
