"""FlashAttention 4, the CuTe kernels of ``flash_attn.cute``: forward, backward with and without atomics, decoding."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bench.peers.base import Absent, Call, Table

# Its compiled kernels stay on disk only if this is set before it is imported.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
MLA_SCALE = 128**-0.5  # of the rows of latent attention


def _first(result: Any) -> Any:
    """The output, which some versions return together with the lse."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _forward(q: Any, k: Any, v: Any, causal: bool = True, scale: float | None = None, **_: Any) -> Call:
    from flash_attn.cute import flash_attn_func

    return lambda: _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def _mla_forward(q: Any, k: Any, v: Any, **_: Any) -> Call:
    return _forward(q, k, v, True, MLA_SCALE)


def _backward(deterministic: bool) -> Any:
    def prepare(
        dy: Any, q: Any, k: Any, v: Any, causal: bool = True, scale: float | None = None, **_: Any
    ) -> Call:  # fmt: skip
        """Autograd's backward alone; its forward is called here."""
        import torch
        from flash_attn.cute import flash_attn_func

        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = _first(flash_attn_func(*leaves, softmax_scale=scale, causal=causal, deterministic=deterministic))
        return lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True)

    return prepare


def _varlen(q: Any, k: Any, v: Any, ends: Any, **_: Any) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    longest = int((ends[1:] - ends[:-1]).max())
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: _first(flash_attn_varlen_func(q, k, v, **lengths, causal=True))


def _decode(q: Any, k: Any, v: Any, lengths: Any, table: Any, **_: Any) -> Call:
    """As many splits of the keys as it chooses, or one where it cannot."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if k.dtype != q.dtype:
        raise Absent("its cache has the dtype of q")
    rows = q.unsqueeze(1)

    def call(splits: int) -> Any:
        if table is None:
            out = flash_attn_func(rows, k, v, num_splits=splits)
        else:
            out = flash_attn_varlen_func(rows, k, v, seqused_k=lengths, page_table=table, num_splits=splits)
        return _first(out).squeeze(1)

    return _first_that_works([lambda: call(0), lambda: call(1)])


def _first_that_works(calls: list[Callable[[], Any]]) -> Call:
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
            continue
        return call
    raise errors[0]


_BACKWARD = {"fa4": _backward(False), "fa4_deterministic": _backward(True)}
ADAPTERS: Table = {
    "attention_fwd": {"fa4": _forward},
    "attention_bwd": _BACKWARD,
    "attention_varlen_fwd": {"fa4": _varlen},
    "attention_decode": {"fa4": _decode},
    "mla_attention_fwd": {"fa4": _mla_forward},
    "mla_attention_bwd": _BACKWARD,
}
