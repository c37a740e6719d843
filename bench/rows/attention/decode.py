"""Benchmark rows of ``decode``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.attention.attention import BACKENDS
from bench.rows.row import Row
from rtkernels.ops.attention.decode import attention_decode

_HEADS, _HEADS_KV, _WIDTH, _PAGE = 32, 8, 128, 64


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, scale: float) -> torch.Tensor:
    if table is not None:
        k, v = (cache[table.long()].flatten(1, 2) for cache in (k, v))
    k, v = (cache.to(q.dtype).transpose(1, 2) for cache in (k, v))
    if scale != 1.0:
        k, v = k * scale, v * scale
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)


def _on_backend(name: str) -> Any:
    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, **_: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, name)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return _dense(q, k, v, table, 1.0)

        return call

    return prepare


def at(
    batch: int, length: int, heads: int, heads_kv: int, width: int, dtype: torch.dtype, page: int | None
) -> Row:  # fmt: skip
    """Return the row of a cache of a size: of pages in a random order, or, without a page size, of whole sequences."""

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        pages = batch if page is None else batch * length // page
        shape = (pages, page or length, heads_kv, width)
        k, v = ((torch.randn(shape, device=device, generator=generator) * 16).to(dtype) for _ in range(2))
        order = torch.randperm(pages, device=device, generator=generator).int()
        return {
            "q": torch.randn(batch, heads, width, device=device, generator=generator).bfloat16(),
            "k": k,
            "v": v,
            "lengths": torch.full((batch,), length, dtype=torch.int32, device=device),
            "table": None if page is None else order.view(batch, length // page),
            "scale": torch.full((), 1.0 / 16, device=device),
        }

    def ours(q, k, v, lengths, table, scale):
        scale = None if k.dtype == q.dtype else scale
        return attention_decode(q, k, v, lengths, page_table=table, k_scale=scale, v_scale=scale)

    # Of the row's dtype, not of k's: the reference gets all of them in float64.
    factor, layout = 1.0 if dtype == torch.bfloat16 else 1.0 / 16, f"pages of {page}" if page else "one sequence each"
    return Row(
        name="attention_decode",
        shape=f"{batch} x {length} keys, {heads}/{heads_kv} heads of {width}, {layout} {dtype}".replace("torch.", ""),
        make=make,
        ours=ours,
        torch=lambda q, k, v, lengths, table, scale: _dense(q, k, v, table, factor),
        bytes=2 * batch * length * heads_kv * width * dtype.itemsize + 4 * batch * heads * width,
        backends={} if page or factor != 1.0 else {key: _on_backend(name) for key, name in BACKENDS.items()},
    )


def rows() -> Iterator[Row]:
    for batch, length, dtype in (
        (1, 8192, torch.bfloat16), (1, 65536, torch.bfloat16), (16, 8192, torch.bfloat16), (128, 1024, torch.bfloat16),
        (128, 8192, torch.bfloat16), (16, 8192, torch.float8_e4m3fn), (16, 8192, torch.int8),
    ):  # fmt: skip
        yield at(batch, length, _HEADS, _HEADS_KV, _WIDTH, dtype, _PAGE)
