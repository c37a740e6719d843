"""Benchmark rows of ``sparse_mla``: FlashMLA has 640 TFLOP/s for prompts, 410 for decoding on an H800 (README)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.rows.row import Row
from rtkernels.ops.attention.sparse_mla import decoded, sparse_mla

_WIDTH, _VALUE, _COUNT, _KEYS = 576, 512, 2048, 32768


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    q, indices = x[:, :512].reshape(-1, 8, 64), torch.zeros(x.shape[0], 4, dtype=torch.int32, device=x.device)
    return {"sparse_mla": lambda: sparse_mla(q, q[:, 0], indices, value_width=64)}


def _plain(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows = kv.to(q.dtype) if kv.dtype != torch.uint8 else decoded(kv).to(q.dtype)
    outs = []
    for first in range(0, q.shape[0], 64):  # the chosen keys of all tokens would take 10 GB
        chosen = rows[indices[first : first + 64].long()]
        scores = (q[first : first + 64] @ chosen.mT).float() * _WIDTH**-0.5
        outs.append(scores.softmax(-1).to(q.dtype) @ chosen[..., :_VALUE])
    return torch.cat(outs)


def rows() -> Iterator[Row]:
    for tokens, coded in ((4096, False), (4096, True), (128, True), (1, True)):

        def make(device: str, generator: torch.Generator, size=(tokens, coded)) -> dict[str, Any]:
            tokens, coded = size
            kv = torch.randn(_KEYS, _WIDTH, device=device, generator=generator).bfloat16()
            if coded:
                codes = kv[:, :_VALUE].to(torch.float8_e4m3fn).view(torch.uint8)
                ones = torch.ones(_KEYS, 4, device=device).view(torch.uint8)
                kv = torch.cat((codes, ones, kv[:, _VALUE:].contiguous().view(torch.uint8)), 1)
            indices = torch.randint(0, _KEYS, (tokens, _COUNT), device=device, generator=generator)
            q = torch.randn(tokens, 128, _WIDTH, device=device, generator=generator).bfloat16()
            return {"q": q, "kv": kv, "indices": indices.int()}

        row = 656 if coded else 2 * _WIDTH
        yield Row(
            name="sparse_mla",
            shape=f"{tokens} tokens, 128 heads, {_COUNT} of {_KEYS} keys, {'656 bytes' if coded else 'bf16'}",
            make=make,
            ours=lambda q, kv, indices: sparse_mla(q, kv, indices),
            torch=_plain,
            bytes=2 * tokens * 128 * (_WIDTH + _VALUE) + 4 * tokens * _COUNT + min(tokens * _COUNT, _KEYS) * row,
            flops=2 * tokens * 128 * _COUNT * (_WIDTH + _VALUE),
        )
