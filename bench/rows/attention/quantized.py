"""Benchmark rows of ``quantized``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.attention.attention import head_by_head
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


def _coded(t: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes with a scale for all elements along a dimension, and the scales without it."""
    scale = t.abs().amax(dim, keepdim=True).float() / 448
    return (t / scale).to(torch.float8_e4m3fn), scale.squeeze(dim)


def latent(batch: int, length: int, heads: int, codes_of_v: bool) -> Row:
    """Return a row of linghe's fp8 attention with heads of 192 and 128; ``mla_attention_fwd`` has bfloat16 operands."""
    scale = 128**-0.5

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        q, k, v = (
            torch.randn(batch, length, heads, width, device=device, generator=generator).bfloat16()
            for width in (192, 192, 128)
        )
        (qc, qs), (kc, ks) = (_coded(t, -1) for t in (q, k))
        given = {"q16": q, "k16": k, "v16": v, "q": qc, "k": kc, "v": v, "sv": None}
        if codes_of_v:
            values, given["sv"] = _coded(v, 1)
            given["v"] = values.permute(0, 2, 3, 1).contiguous()
        return {**given, "sq": qs.transpose(1, 2).contiguous(), "sk": ks.transpose(1, 2).contiguous()}

    def plain(q16: torch.Tensor, k16: torch.Tensor, v16: torch.Tensor, **_: Any) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q16, k16, v16))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)

    def exact(q16: torch.Tensor, k16: torch.Tensor, v16: torch.Tensor, **_: Any) -> torch.Tensor:
        return head_by_head(plain, torch.float64)(q16, k16, v16)

    return Row(
        name="attention_quantized",
        shape=f"{batch}x{length} {heads} heads of 192/128 causal, e4m3 and {'e4m3' if codes_of_v else 'bfloat16'}",
        make=make,
        ours=lambda q, k, v, sq, sk, sv, **_: attention_quantized(q, k, v, sq, sk, sv, scale=scale, causal=True),
        torch=plain,
        exact=exact,
        bytes=batch * heads * length * (2 * 192 + 128 * (3 if codes_of_v else 4)),
        flops=batch * heads * length**2 * (192 + 128),
    )


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

    for codes_of_v in (True, False):
        yield latent(8, 4096, 16, codes_of_v)

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
