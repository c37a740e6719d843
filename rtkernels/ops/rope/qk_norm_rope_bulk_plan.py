"""The backward of qk_norm_rope on GPUs that copy in bulk: tokens pass through shared memory (rope/token_ring.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.rope_operators import TYPES
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.targets import Target

if TYPE_CHECKING:
    from rtkernels.ops.rope.qk_norm_rope_plan import Qkv

_BY_ELEMENT = 4  # kByElement
PAIR_ORDERS = (angles_of.HALVES, angles_of.ADJACENT, _BY_ELEMENT)  # PAIRS of the backward
_SILU = (False, True)
_WARPS = 10  # that work on heads
_HELPERS = 2  # warps that copy and make rotations
_MORE_WARPS = 12  # where warpgroups pass registers on
_MORE_HELPERS = 4  # there
_SMALL_HEAD = 128  # bytes


def head_warps(target: Target, silu: bool) -> int:
    """Return HEAD_WARPS of a block.

    Twelve fit if the helper warps give up registers, except with silu, which needs more registers per warp. Ten would
    be 1 to 2 % faster at heads of 96 elements of 16 bits and more, which does not pay for variants of their own.
    """
    return _MORE_WARPS if "wgmma" in target.features and not silu else _WARPS


def _variants(target: Target) -> Iterator[tuple[str, int, bool, int]]:
    for t in TYPES:
        for order in PAIR_ORDERS:
            for silu in _SILU:
                yield t, order, silu, head_warps(target, silu)


BWD_BULK = Kernel(
    "rope/qk_norm_rope_bwd_bulk.cu", "qk_norm_rope_bwd_bulk", template="T PAIRS SILU HEAD_WARPS", max_registers=168,
    needs=("tma",), struct=True,
    args="dq:ptr dk:ptr dv:ptr qkv:ptr q_weight:ptr k_weight:ptr dqkv:ptr partial:ptr dq_batch:i64 dq_place:i64 "
    "dq_head:i64 dk_batch:i64 dk_place:i64 dk_head:i64 dv_batch:i64 dv_place:i64 dv_head:i64 dqkv_batch:i64 "
    "dqkv_place:i64 tokens:i64 length:i64 inner:i64 batch_inner:i64 qkv_batch:i64 qkv_place:i64 q_heads:i64 "
    "kv_heads:i64 q_slots:i64 kv_slots:i64 max_heads:i64 consumer_warps:i64 consumers:i64 stages:i64 group_magic:i64 "
    "q_extra:i64 kv_step:i64 k_first:i64 v_first:i64 x_extra:i64 x_stretches:i64 x_stretch_heads:i64 head_dim:i64 "
    "head_lanes:i64 rotating_warps:i64 tokens_together:i64 neighbours:i64 weight_fp32:i64 eps:f64 "
    "offset:f64 " + angles_of.ARGS,
    variants=_variants,
)  # fmt: skip

_STAGES = 4  # if they fit
_MAX_STAGES = 16  # in _RING_BYTES
_RING_BYTES = 104 << 10
_RING_BYTES_BY_ELEMENT = 150 << 10  # for pairs by element
_STAGE_EXTRA = 32  # bytes: two barriers, where results go, and room to keep 16-byte alignment


class Consumers(NamedTuple):
    """Who does what in a block: the arguments q_slots to stages of the kernels."""

    q_slots: int
    kv_slots: int
    max_heads: int
    warps: int
    consumers: int
    stages: int

    def groups(self, lanes: int) -> int:
        """Return the groups of lanes of one consumer."""
        return self.warps * (32 // lanes)


def order_of_pairs(head_dim: int, rotary: int, size: int, pairs: int) -> int:
    """Return PAIRS of the backward's kernels: `pairs`, if lanes can have both elements of every pair in two chunks."""
    whole = rotary // 2 * size % 16 == 0 and head_dim * size % 32 == 0
    return pairs if whole else _BY_ELEMENT


def share_out(
    q_heads: int, kv_heads: int, lanes: int, stage: int, memory: int, ring: int = _RING_BYTES, warp_limit: int = _WARPS
) -> Consumers | None:
    """Return consumers for stages of `stage` bytes in `memory` bytes; None if not even two stages fit.

    A consumer has one token at a time, whose heads a group of lanes takes one after the other. Of all numbers of
    heads for a group, this takes the one that lets the largest number of tokens through the block. Each consumer should
    find a second stage full.
    """
    groups, best = 32 // lanes, None
    for heads in range(1, q_heads + kv_heads):
        slots = -(-q_heads // heads), -(-kv_heads // heads)
        warps = -(-(slots[0] + 2 * slots[1]) // groups)
        stages = min(max(_STAGES, min(_MAX_STAGES, ring // stage)), (memory - 16 * heads * warps * groups) // stage)
        if warps > warp_limit or stages < 2:
            continue
        consumers = min(warp_limit // warps, max(stages // 2, 1))
        # What a token costs besides its heads is about a third of one; 3 % each fits heads of 40 and 48 elements.
        speed = consumers * (1.0 - 0.03 * consumers) / (heads + 0.3)
        if best is None or speed > best[0]:
            best = speed, Consumers(*slots, heads, warps, consumers, stages - stages % consumers)
    return None if best is None else best[1]


def share_rotations(lanes: int, multiple: int, stages: int, limit: int) -> tuple[int, int, int]:
    """Return how many warps, `limit` or fewer, make rotations, of how many tokens at a time, and with how many stages.

    Stages are a multiple of `multiple`. A warp of several has its own, and at most as many tokens at a time as it has
    groups of lanes.
    """
    groups, choices = 32 // lanes, []
    for warps in range(2, limit + 1):
        for used in range(multiple, stages + 1, multiple):
            together = max(t for t in range(1, groups + 1) if used // warps % t == 0)
            if used % warps == 0 and together > 1:
                choices.append((used, together, warps))
    if choices:
        used, together, warps = max(choices)
        return warps, together, used
    return 1, min(groups, (stages + 1) // 2), stages


def plan_bulk(
    found: Qkv, strides: tuple[int, ...], rotary: int, t: str, size: int, pairs: int, silu: bool, weight: Meta | None,
    eps: float, offset: float, device: int,
) -> tuple[Launch, tuple[int | float, ...], int] | None:  # fmt: skip
    """Return the launch, its arguments after the pointers and how many partial rows it leaves; None if it cannot."""
    info = device_info(device)
    lanes = -(-found.head_dim * size // 32)
    order = order_of_pairs(found.head_dim, rotary, size, pairs)
    extra = 2 if silu else 1  # v's part of x is needed for silu only
    if found.grouped:
        x_extra, stretches, stretch_heads = extra, found.kv_heads, found.q_heads // found.kv_heads + extra
    else:
        x_extra, stretches, stretch_heads = 0, 1, found.q_heads + extra * found.kv_heads
    heads = found.q_heads + 2 * found.kv_heads + stretches * stretch_heads
    stage = heads * found.head_dim * size + 256 // size * lanes + _STAGE_EXTRA
    ring = _RING_BYTES_BY_ELEMENT if order == _BY_ELEMENT else _RING_BYTES
    warps = head_warps(info.target, silu)
    helpers = _MORE_HELPERS if warps == _MORE_WARPS else _HELPERS
    shares = share_out(found.q_heads, found.kv_heads, lanes, stage, info.shared_per_block, ring, warps)
    if shares is None:
        return None
    # Pairs by element are more work. Small heads leave no helper for it: they need more that copy.
    limit = 1 if order != _BY_ELEMENT or helpers == _HELPERS else 2 if found.head_dim * size <= _SMALL_HEAD else 3
    rotating, together, stages = share_rotations(lanes, shares.consumers, shares.stages, limit)
    shares = shares._replace(stages=stages)
    inner, batch_inner = found.inner
    weight_fp32 = int(weight is not None and weight.dtype == torch.float32)
    arguments = (
        *strides, found.tokens, found.length, inner, int(batch_inner), found.batch_stride, found.place_stride,
        found.q_heads, found.kv_heads, *shares, *found.head_order(), x_extra, stretches, stretch_heads, found.head_dim,
        lanes, rotating, together, int(pairs == angles_of.ADJACENT), weight_fp32, eps, offset,
    )  # fmt: skip
    sums = 4 * found.head_dim * shares.consumers * shares.groups(lanes)
    shared = max(shares.stages * stage + 16 * shares.max_heads * shares.groups(lanes), sums)
    grid = min(found.tokens, info.sm_count)
    threads = 32 * (warps + helpers)
    return BWD_BULK.bind((t, order, silu, warps), device, grid, threads, shared), arguments, grid
