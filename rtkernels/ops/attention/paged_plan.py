"""Packed queries over a paged cache: kernel records and launches.

Batches with at most one query per sequence go to the kernels of decoding, which split the keys over blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import decode_plan
from rtkernels.ops.attention.backends import packed_tail
from rtkernels.ops.attention.mma_plan import head_section, tile_pitch
from rtkernels.ops.attention.problem import Strides
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, divisor, float_halves
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_TOKENS = ("bf16", "fp16")
_THREADS = 128
_LOG2E = 1.4426950408889634
PAGE_UNIT = 16  # keys: sizes of pages are multiples of it (paged_rows.cuh)


class PagedTiles(NamedTuple):
    """Width up to which a kernel serves heads, 16-row blocks of queries per warp, keys of a tile."""

    width: int
    blocks: int
    keys: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: q, and two stages of keys and values."""
        return (64 * self.blocks + 4 * self.keys) * tile_pitch(self.width)


_TILES = (PagedTiles(64, 2, 64), PagedTiles(128, 2, 32), PagedTiles(256, 1, 32))

PAGED = Kernel(
    "attention/attention_paged.cu", "attention_paged", template="T CODES D MT BN", max_registers=255, tier="serve",
    args="q:ptr k_cache:ptr v_cache:ptr cu_q:ptr lengths:ptr table:ptr k_scale:ptr v_scale:ptr sinks:ptr out:ptr "
    "lse:ptr sequences:i64 tiles:i64 section:i64 heads_kv:i64 group:i64 group_divisor:i64 lkv:i64 d_qk:i64 d_v:i64 "
    "page_size:i64 page_divisor:i64 table_row:i64 q_row:i64 q_head:i64 k_page:i64 k_row:i64 k_head:i64 v_page:i64 "
    "v_row:i64 v_head:i64 out_row:i64 out_head:i64 lse_head:i64 k_scale_head:i64 v_scale_head:i64 left:i64 right:i64 "
    "scale_factor:i64 softcap_inverse:i64",
    variants=[(t, codes, *tiles) for t in _TOKENS for codes in (0, 1, 2) for tiles in _TILES],
)  # fmt: skip
TOKENS = Kernel(
    "attention/paged_tokens.cu", "attention_paged_tokens", template="T", max_registers=48, tier="serve",
    args="cu_q:ptr lengths:ptr table:ptr row_lengths:ptr row_table:ptr sequences:i64 lkv:i64 page_size:i64 "
    "table_row:i64",
    variants=[("fp32",)],
)  # fmt: skip
KERNELS = (PAGED, TOKENS)


class Paged(NamedTuple):
    """One call, as plain data. Strides are in elements: q and out of (row, head), k and v of (page, row, head)."""

    token: str
    codes: int
    sequences: int
    total: int
    max_q: int
    max_k: int
    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    page_size: int
    table_row: int
    q: tuple[int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    out: tuple[int, int]
    k_scale_head: int
    v_scale_head: int
    left: int
    right: int
    scale: float
    softcap: float

    @property
    def lkv(self) -> int:
        """Keys that a sequence can have."""
        return self.page_size * self.table_row


def one_each(max_q: int, total: int) -> bool:
    """Return whether sequences have at most one query, so that a call is decoding; it has one block row per query."""
    return max_q == 1 and 0 < total <= 65535


def steps(call: Paged, device: int) -> Steps:
    """Return the launches of a call."""
    if call.total == 0:
        return Steps()
    if one_each(call.max_q, call.total):
        return _decoding(call, device)
    group = call.heads_q // call.heads_kv
    config = next(t for t in _TILES if max(call.d_qk, call.d_v) <= t.width)
    rows = 64 * config.blocks
    tiles = call.total * group // rows + call.sequences  # some have no rows
    if tiles * call.heads_kv > GRID_LIMIT or call.total * group > GRID_LIMIT:
        raise ArgumentError(f"q has {call.total} tokens of {call.heads_q} heads; expected fewer than 2^31 rows")
    bytes_per_key = (1 if call.codes else 2) * (call.d_qk + call.d_v)
    section = head_section(bytes_per_key, min(call.max_k, call.lkv), call.heads_kv, 1)
    plain = call.softcap == 0.0 and not call.codes
    numbers = (
        *(call.sequences, tiles, section, call.heads_kv, group, divisor(group), call.lkv, call.d_qk, call.d_v),
        *(call.page_size, divisor(call.page_size), call.table_row, *call.q, *call.k, *call.v, *call.out, call.total),
        *(call.k_scale_head, call.v_scale_head, call.left, call.right),
        float_halves(call.scale, call.scale * _LOG2E if plain else _LOG2E),
        float_halves(call.softcap, call.scale / call.softcap if call.softcap else 0.0),
    )
    names = ("q", "k", "v", "cu_seqlens_q", "seqused_k", "page_table", "k_scale", "v_scale", "sinks", "out", "lse")
    variant, grid = (call.token, call.codes, *config), tiles * call.heads_kv
    launch = PAGED.bind(variant, device, grid if call.sequences else 0, _THREADS, config.shared)
    shape, strides = (call.total, call.heads_q, call.d_v), Strides(0, *call.out)
    tail = packed_tail(call.token, "out", "lse", "cu_seqlens_q", call.sequences, shape, strides, device)
    return Steps(Step(launch, *names, *numbers), tail)


def _decoding(call: Paged, device: int) -> Steps:
    """Return the launches for at most one query per sequence: rows without a sequence get a length of 0."""
    decode = decode_plan.Decode(
        token=call.token, codes=call.codes, batch=call.total, lq=1, heads_q=call.heads_q, heads_kv=call.heads_kv,
        d_qk=call.d_qk, d_v=call.d_v, lkv=call.lkv, page_size=call.page_size, table_row=call.table_row,
        q=(call.q[0], 0, call.q[1]), k=call.k, v=call.v, k_scale_head=call.k_scale_head,
        v_scale_head=call.v_scale_head, left=call.left, right=call.right, scale=call.scale, softcap=call.softcap,
        out=(call.out[0], 0, call.out[1]),
    )  # fmt: skip
    launch = TOKENS.bind(("fp32",), device, call.total, _THREADS)
    sizes = call.sequences, call.lkv, call.page_size, call.table_row
    rows = Step(launch, "cu_seqlens_q", "seqused_k", "page_table", "row_lengths", "row_table", *sizes)
    names = ("q", "k", "v", "row_lengths", "row_table", "k_scale", "v_scale", "sinks")
    other = decode_plan.steps(decode, device, names)
    scratch = {
        "row_lengths": Memory((call.total,), torch.int32),
        "row_table": Memory((call.total, call.table_row), torch.int32),
    }
    return _after(rows, other, scratch)


def _after(first: Step, steps: Steps, scratch: dict[str, Memory]) -> Steps:
    other = steps.if_not_resident
    return Steps(
        first, *steps.steps, scratch=scratch | steps.scratch, zeros=steps.zeros, kept_zeros=steps.kept_zeros,
        if_not_resident=None if other is None else lambda: _after(first, other(), scratch),
    )  # fmt: skip
