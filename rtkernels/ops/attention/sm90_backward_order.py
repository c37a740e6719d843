"""The order in which blocks of the backward on sm_90a take tiles of keys and meet queries (``sm90_bwd.cuh``).

A block owns a tile of keys. Blocks that run together read the queries of the same heads, and add to their dq in a fixed
order, so the order decides how much of both is in L2 and how long blocks wait for each other. Where keys have too few
tiles for all SMs, or under a mask very unequal ones, the query heads that share keys are split into parts, whose dk and
dv are added by another launch.
"""

from __future__ import annotations

from typing import NamedTuple

from rtkernels.ops.attention.problem import Attention
from rtkernels.ops.attention.sm90_forward_plan import extras
from rtkernels.runtime.invariance import level

_KEYS = 128  # of a tile
_L2_BYTES = 16 << 20  # of q, dout and sums of dq of heads that are worked on together
_STEP_US = 2.1  # a tile of keys by a tile of queries
_EXTRA_STEPS = 6  # beginning and end of a tile of keys
_PARTS_US, _PARTS_BYTES_PER_US = 5.0, 3.5e6  # a launch that adds parts
_SHORT_CHUNK = 64  # tiles of keys, up to which a chunk that begins with the longest is faster
_IN_CHUNKS = range(16, 33)  # tiles of keys of a head that are taken in chunks under a mask
_CHUNKS, _BUSY = 4, 128  # chunks of a head, and blocks that run together
_MIN_QUERY_TILES = 8  # below, adding parts takes as long as they save


class Order(NamedTuple):
    """How tiles of keys are taken.

    ``parts``: of the query heads that share keys. ``heads``: how many heads of keys (times parts) share L2.
    ``together``: tiles of keys in a chunk, which start at different queries; ``ascending``: the first of them, which
    meet the most queries under a causal mask, are taken first. ``resident``: blocks wait for blocks that may begin
    after them.
    """

    parts: int
    heads: int
    together: int
    ascending: bool
    resident: bool


def splits_heads(problem: Attention) -> bool:
    """Return whether the kernels can split query heads that share keys: not in one pass with a soft-cap or limits."""
    return max(problem.d_qk, problem.d_v) > 128 or not extras(problem)


def parts_of_heads(problem: Attention, sm_count: int, tile_queries: int) -> int:
    """Return into how many parts the query heads that share keys are split: the fastest by an estimate."""
    p = problem
    if not splits_heads(p) or not {"k", "v"} & {*p.wants}:
        return 1
    if level():
        return next((n for n in range(2, p.group + 1) if p.group % n == 0), 1)
    tiles = p.batch * p.heads_kv * -(-p.lkv // _KEYS)
    steps = p.group * -(-p.lq // tile_queries)
    diagonal = p.left >= 0 or p.right >= 0
    width = sum(w for letter, w in (("k", p.d_qk), ("v", p.d_v)) if letter in p.wants)

    def time(parts: int) -> float:
        longest, units = steps / parts + _EXTRA_STEPS, tiles * parts
        if diagonal:  # tiles take about half as long on average, and the longest come first
            longest = max(longest, units * (steps / parts / 2 + _EXTRA_STEPS) / sm_count)
        else:
            longest *= -(-units // sm_count)
        adds = 0.0
        if parts > 1:
            adds = _PARTS_US + 2 * 4 * parts * p.rows_k * p.heads_kv * width / _PARTS_BYTES_PER_US
        return longest * _STEP_US + adds

    return min((n for n in range(1, p.group + 1) if p.group % n == 0), key=time)


def backward_order(problem: Attention, sm_count: int, tile_queries: int, in_chunks: bool = True) -> Order:
    """Return the order for a problem; without chunks, blocks wait only for blocks that have begun before them.

    Without a mask, all blocks are busy if whole chunks run, each of another head, its blocks almost two tiles of
    queries or more apart. Under a mask with a diagonal a chunk is all of a head, because a block then waits for shorter
    ones only, or a fourth of one, of as many heads as fill the SMs. Blocks of a chunk drift apart with every head that
    they meet, so it has few query heads, whose q, dout and dq are in L2. The longest tiles come first where they meet
    several heads, and wait for each other tile by tile where heads cannot be split.
    """
    p = problem
    parts = parts_of_heads(p, sm_count, tile_queries)
    tiles, query_tiles = -(-p.lkv // _KEYS), -(-p.lq // tile_queries)
    in_l2 = max(1, _L2_BYTES // max(1, p.lq * (2 * p.d_qk + 2 * p.d_v + 4 * p.d_qk)))
    if p.left >= 0 or p.right >= 0:
        if not splits_heads(p) and p.group > 1:
            return Order(1, min(p.batch * p.heads_kv, 16), 1, False, False)
        if level():  # dq of a tile of queries is added up from its last tile of keys on
            return Order(parts, 1, tiles, False, False)
        if p.group > 1 and query_tiles > _MIN_QUERY_TILES and {"k", "v"} & {*p.wants}:
            parts = next(n for n in range(max(2, parts), p.group + 1) if p.group % n == 0 and p.group <= n * in_l2)
        longest_first = in_chunks and parts < p.group and 1 < tiles <= min(sm_count, _SHORT_CHUNK)
        heads, together = p.batch * p.heads_kv * parts, tiles // _CHUNKS
        if tiles in _IN_CHUNKS and not p.varlen and heads * together >= _BUSY:
            return Order(parts, _BUSY // together, together, longest_first, longest_first)
        return Order(parts, 1, tiles, longest_first, longest_first)
    heads = p.batch * p.heads_kv * parts
    blocks, heads = min(sm_count, heads * tiles), min(heads, in_l2)
    chunks = -(-tiles // min(max(1, query_tiles * 3 // 5), blocks))
    together = -(-tiles // chunks)
    if together == 1 or not in_chunks or level():
        return Order(parts, heads, 1, False, False)
    return Order(parts, heads, together, False, True)
