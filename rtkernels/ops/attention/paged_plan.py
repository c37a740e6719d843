"""Packed queries over a paged cache: kernel records and launches.

Batches with at most one query per sequence go to the kernels of decoding, which split the keys over blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import decode_plan
from rtkernels.ops.attention.backends import packed_tail
from rtkernels.ops.attention.mma_plan import head_section, tile_pitch
from rtkernels.ops.attention.problem import Strides
from rtkernels.ops.attention.sm90_forward_plan import BIAS_TILES, INVARIANT_TILE, Tile
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, divisor, float_halves
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps, box_strides
from rtkernels.runtime.targets import Target

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
    "attention/attention_paged.cu", "attention_paged", template="T CODES D MT BN", max_registers=255, struct=True,
    tier="serve",
    args="q:ptr k_cache:ptr v_cache:ptr cu_q:ptr lengths:ptr table:ptr k_scale:ptr v_scale:ptr sinks:ptr slopes:ptr "
    "out:ptr lse:ptr sequences:i64 tiles:i64 section:i64 heads_kv:i64 group:i64 group_divisor:i64 lkv:i64 d_qk:i64 "
    "d_v:i64 page_size:i64 page_divisor:i64 table_row:i64 q_row:i64 q_head:i64 k_page:i64 k_row:i64 k_head:i64 "
    "v_page:i64 v_row:i64 v_head:i64 out_row:i64 out_head:i64 lse_head:i64 k_scale_head:i64 v_scale_head:i64 "
    "slopes_batch:i64 left:i64 right:i64 scale_factor:i64 softcap_inverse:i64",
    variants=[(t, codes, *tiles) for t in _TOKENS for codes in (0, 1, 2) for tiles in _TILES],
)  # fmt: skip
TOKENS = Kernel(
    "attention/paged_tokens.cu", "attention_paged_tokens", template="T", max_registers=48, tier="serve",
    args="cu_q:ptr lengths:ptr table:ptr row_lengths:ptr row_table:ptr sequences:i64 lkv:i64 page_size:i64 "
    "table_row:i64",
    variants=[("fp32",)],
)  # fmt: skip
_SM90_TILES = (Tile(64, 64, 128, 2), INVARIANT_TILE)  # there are no registers for wider heads
CAPPED_TILE = BIAS_TILES[-1]  # for a soft cap with batch invariance: the keys of contiguous caches
SM90 = Kernel(
    "attention/attention_sm90_paged.cu", "attention_sm90_paged", template="T D BN EXTRAS CODES", max_registers=168,
    needs=("wgmma",), tier="serve",
    args="q_map:tmap k_map:tmap v_map:tmap out:ptr lse:ptr sinks:ptr cu_q:ptr lengths:ptr table:ptr counter:ptr "
    "sequences:i64 tiles:i64 section:i64 heads_kv:i64 group:i64 group_divisor:i64 lkv:i64 d_v:i64 unit:i64 "
    "page_size:i64 page_divisor:i64 table_row:i64 out_row:i64 out_head:i64 lse_head:i64 left:i64 right:i64 scale:f64 "
    "softcap:f64 k_scale:ptr v_scale:ptr scale_heads:i64",
    variants=[
        (t, tile.d_v, tile.keys, extras, codes)
        for t in _TOKENS for tile in _SM90_TILES for extras in (0, 1) for codes in (0, 1, 2)
    ]
    + [(t, CAPPED_TILE.d_v, CAPPED_TILE.keys, 1, 0) for t in _TOKENS],
)  # fmt: skip
KERNELS = (PAGED, TOKENS, SM90)


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
    pages: int
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
    backend: str = "auto"
    alibi: bool = False
    slopes_batch: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads_q // self.heads_kv

    @property
    def lkv(self) -> int:
        """Keys that a sequence can have."""
        return self.page_size * self.table_row


def one_each(max_q: int, total: int, backend: str, alibi: bool = False) -> bool:
    """Return whether sequences have at most one query, so that a call is decoding; it has one block row per query."""
    return not alibi and max_q == 1 and 0 < total <= 65535 and backend == "auto" and not level()


def unsupported_sm90(call: Paged, target: Target) -> str | None:
    """Return why the wgmma kernel cannot serve a call, or None."""
    if "wgmma" not in target.features:
        return f"{target} has no wgmma"
    if call.alibi:
        return "there are alibi_slopes"
    if call.group > 64 or call.group & (call.group - 1):
        return f"{call.group} heads share keys; a power of two up to 64 is expected"
    if max(call.d_qk, call.d_v) > _SM90_TILES[-1].d_v:
        return f"heads have more than {_SM90_TILES[-1].d_v} elements"
    if call.pages == 0 or call.lkv == 0:
        return "there are no keys"
    if any(2 * step >= 1 << 40 for step in (*call.q, *call.k, *call.v)):
        return "strides are too large"
    return None


def steps(call: Paged, device: int) -> Steps:
    """Return the launches of a call."""
    if call.total == 0:
        return Steps()
    if one_each(call.max_q, call.total, call.backend, call.alibi) and call.sequences:
        return _decoding(call, device)
    if call.total * call.heads_q + call.sequences * call.heads_kv > GRID_LIMIT:
        raise ArgumentError(f"q has {call.total} tokens of {call.heads_q} heads; expected fewer than 2^31 rows")
    refused = unsupported_sm90(call, device_info(device).target)
    if call.backend == "sm90" and refused:
        raise ArgumentError(f"backend is 'sm90', which cannot run this: {refused}")
    has_keys = call.pages > 0 and call.lkv > 0
    if level() and has_keys and not call.codes and refused and "wgmma" in device_info(device).target.features:
        refuse("attention over pages", f"keys in one piece are added in another order, because {refused}")
    by_wgmma = call.backend == "sm90" or (call.backend == "auto" and not refused)
    step, zeros = (_sm90 if by_wgmma else _mma)(call, device)
    shape, strides = (call.total, call.heads_q, call.d_v), Strides(0, *call.out)
    tail = packed_tail(call.token, "out", "lse", "cu_seqlens_q", call.sequences, shape, strides, device)
    return Steps(*([step] if call.sequences else []), tail, zeros=zeros if call.sequences else None)


def _tiles(call: Paged, rows: int) -> tuple[int, int]:
    """Return the number of tiles of `rows` rows, some of which may be empty, and of heads to process together."""
    bytes_per_key = (1 if call.codes else 2) * (call.d_qk + call.d_v)
    section = head_section(bytes_per_key, min(call.max_k, call.lkv), call.heads_kv, 1)
    return call.total * call.group // rows + call.sequences, section


def _sm90(call: Paged, device: int) -> tuple[Step, dict[str, int] | None]:
    tile = next(t for t in _SM90_TILES if max(call.d_qk, call.d_v) <= t.d_v)
    if level() and call.softcap and tile.d_v == CAPPED_TILE.d_v and not call.codes:
        tile = CAPPED_TILE
    loaded, (token, size, columns) = tile.keys, (call.token, 2, 64)
    shared = tile.shared
    if call.codes:  # by four warps, in two stages of keys and values, each row of 128 bytes
        loaded, (token, size, columns) = tile.keys // 4, ("byte", 1, 128)
        shared += 4 * tile.keys * 128 + 128
    rows, unit = 64 * tile.groups, math.gcd(call.page_size, loaded)
    tiles, section = _tiles(call, rows)
    blocks = min(device_info(device).sm_count, tiles * call.heads_kv)
    counter = "counter" if blocks < tiles * call.heads_kv else 0

    def pool(name: str, width: int, steps: tuple[int, int, int]) -> Boxes:
        sizes, (page, row, head) = (width, call.page_size, call.heads_kv, call.pages), steps
        return Boxes(name, token, sizes, box_strides(sizes, (row, head, page), size), (columns, unit, 1, 1))

    sizes = (call.d_qk, call.heads_q, call.total)
    of_q = Boxes(
        "q", call.token, sizes, box_strides(sizes, (call.q[1], call.q[0]), 2), (64, call.group, rows // call.group)
    )
    variant = (call.token, tile.d_v, tile.keys, int(call.softcap != 0.0), call.codes)
    launch = SM90.bind(variant, device, blocks, 128 * (tile.groups + 1), shared)
    step = Step(
        launch, of_q, pool("k", call.d_qk, call.k), pool("v", call.d_v, call.v), "out", "lse", "sinks", "cu_seqlens_q",
        "seqused_k", "page_table", counter, call.sequences, tiles, section, call.heads_kv, call.group,
        divisor(call.group), call.lkv, call.d_v, unit, call.page_size, divisor(call.page_size), call.table_row,
        *call.out, call.total, call.left, call.right, call.scale, call.softcap, "k_scale", "v_scale",
        call.k_scale_head | call.v_scale_head << 32,
    )  # fmt: skip
    return step, {"counter": 1} if counter else None


def _mma(call: Paged, device: int) -> tuple[Step, None]:
    config = next(t for t in _TILES if max(call.d_qk, call.d_v) <= t.width)
    tiles, section = _tiles(call, 64 * config.blocks)
    plain = call.softcap == 0.0 and not call.codes and not call.alibi
    numbers = (
        *(call.sequences, tiles, section, call.heads_kv, call.group, divisor(call.group), call.lkv),
        *(call.d_qk, call.d_v, call.page_size, divisor(call.page_size), call.table_row),
        *(*call.q, *call.k, *call.v, *call.out, call.total, call.k_scale_head, call.v_scale_head),
        *(call.slopes_batch, call.left, call.right, float_halves(call.scale, call.scale * _LOG2E if plain else _LOG2E)),
        float_halves(call.softcap, call.scale / call.softcap if call.softcap else 0.0),
    )
    names = ("q", "k", "v", "cu_seqlens_q", "seqused_k", "page_table", "k_scale", "v_scale", "sinks",
             "alibi_slopes", "out", "lse")  # fmt: skip
    variant, grid = (call.token, call.codes, *config), tiles * call.heads_kv
    return Step(PAGED.bind(variant, device, grid, _THREADS, config.shared), *names, *numbers), None


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
