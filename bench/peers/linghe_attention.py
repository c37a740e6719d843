"""linghe's attention: latent (192/128, its scale is 128 ** -0.5) and lightning."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Absent, Call, Table


def _mla(q: Any, k: Any, v: Any, **_: Any) -> Call:
    from linghe.attn.mla import triton_mla_forward

    if q.shape[1] % 256 or q.shape[1:3] != k.shape[1:3]:
        raise Absent("linghe takes as many keys as queries, whole tiles of 256")
    return lambda: triton_mla_forward(q, k, v, causal=True, safe=True, clip_value=None)[0]


def _lightning(q: Any, k: Any, v: Any, decay: Any, **_: Any) -> Call:
    from linghe.attn.la import triton_lightning_attention_forward

    if q.shape[-1] % 128 or q.shape[1] % 32:
        raise Absent("linghe takes heads of 128 and whole chunks of 32")
    return lambda: triton_lightning_attention_forward(q, k, v, decay)[0]


ADAPTERS: Table = {"mla_attention_fwd": {"linghe": _mla}, "lightning_attention_fwd": {"linghe": _lightning}}
