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

_KEYS = 128  # of a tile
_L2_BYTES = 16 << 20  # of q, dout and sums of dq of heads that are worked on together
_STEP_US = 2.1  # a tile of keys by a tile of queries
_EXTRA_STEPS = 6  # beginning and end of a tile of keys
_PARTS_US, _PARTS_BYTES_PER_US = 5.0, 3.5e6  # a launch that adds parts


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

    Without a mask, all blocks are busy if a whole number of chunks runs, each of another head, its blocks two tiles of
    queries or more apart. Under a mask with a diagonal a block waits for shorter ones only, if a chunk is all of a
    head; where heads of queries share keys there are too few tiles for that, and the longest come first.
    """
    p = problem
    parts = parts_of_heads(p, sm_count, tile_queries)
    heads, group = p.batch * p.heads_kv * parts, p.group // parts
    tiles, apart = -(-p.lkv // _KEYS), -(-p.lq // tile_queries) // 2
    if p.left >= 0 or p.right >= 0:
        if group == 1:
            return Order(parts, 1, tiles, False, False)
        return Order(parts, min(heads, 16), 1, False, False)
    blocks = min(sm_count, heads * tiles)
    in_l2 = _L2_BYTES // max(1, p.lq * (2 * p.d_qk + 2 * p.d_v + 4 * p.d_qk))
    heads = max(1, min(heads, in_l2))
    fits = min(c for c in range(1, blocks + 1) if blocks % c == 0 and blocks // c <= heads)
    together = max(1, min(tiles, apart, fits))
    if together == 1 or not in_chunks:
        return Order(parts, heads, 1, False, False)
    return Order(parts, heads, together, False, True)
