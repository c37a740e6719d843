"""The backward of qk_norm_rope on GPUs that copy in bulk: tokens pass through shared memory (rope/token_ring.cuh)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.angles import Meta
from rtkernels.ops.rope.rope_operators import TYPES
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel

if TYPE_CHECKING:
    from rtkernels.ops.rope.qk_norm_rope_plan import Qkv

BWD_BULK = Kernel(
    "rope/qk_norm_rope_bwd_bulk.cu",
    "qk_norm_rope_bwd_bulk",
    template="T PAIRS SILU",
    args="dq:ptr dk:ptr dv:ptr qkv:ptr q_weight:ptr k_weight:ptr dqkv:ptr partial:ptr dq_batch:i64 dq_place:i64 "
    "dq_head:i64 dk_batch:i64 dk_place:i64 dk_head:i64 dv_batch:i64 dv_place:i64 dv_head:i64 dqkv_batch:i64 "
    "dqkv_place:i64 tokens:i64 length:i64 inner:i64 batch_inner:i64 qkv_batch:i64 qkv_place:i64 q_heads:i64 "
    "kv_heads:i64 q_slots:i64 kv_slots:i64 most:i64 team_warps:i64 teams:i64 stages:i64 group_magic:i64 q_extra:i64 "
    "kv_step:i64 k_first:i64 v_first:i64 x_extra:i64 x_pieces:i64 x_piece_heads:i64 head_dim:i64 lane_bits:i64 "
    "weight_wide:i64 eps:f64 offset:f64 " + angles_of.ARGS,
    variants=[(t, p, s) for t in TYPES for p in (angles_of.HALVES, angles_of.ADJACENT) for s in (False, True)],
    max_registers=168,
    needs=("tma",),
)

_HEADS = 2  # of a group of lanes, if a team then has at most _WARPS; one if that makes a single team
_WARPS = 10  # that work on heads
_HELPERS = 2  # warps that copy and make rotations
_STAGES, _RING = 4, 104 << 10  # at most so many stages, or one more if that is no more than so many bytes
_STAGE_EXTRA = 32  # bytes: two barriers, where results go, and room to keep 16-byte alignment


class Teams(NamedTuple):
    """Who does what in a block: the arguments q_slots to stages of the kernels."""

    q_slots: int
    kv_slots: int
    most: int
    warps: int
    teams: int
    stages: int

    def groups(self, lanes: int) -> int:
        """Return the groups of lanes of one team."""
        return self.warps * 32 // lanes


def share_out(q_heads: int, kv_heads: int, lanes: int, stage: int, memory: int) -> Teams | None:
    """Return teams for stages of `stage` bytes in `memory` bytes; None if not even two stages fit."""

    def shared_by(heads: int) -> tuple[tuple[int, int], int]:
        slots = -(-q_heads // heads), -(-kv_heads // heads)
        return slots, -(-(slots[0] + 2 * slots[1]) * lanes // 32)

    heads = 1 if _WARPS // 2 < shared_by(1)[1] <= _WARPS else _HEADS
    while shared_by(heads)[1] > _WARPS:
        heads += 1
    slots, warps = shared_by(heads)
    most = _STAGES + ((_STAGES + 1) * stage <= _RING)
    stages = min(most, (memory - 16 * heads * (warps * 32 // lanes)) // stage)
    if stages < 2:
        return None
    teams = min(_WARPS // warps, stages)
    return Teams(*slots, heads, warps, teams, stages - stages % teams)


def plan_bulk(
    found: Qkv, strides: tuple[int, ...], lanes: int, t: str, size: int, pairs: int, silu: bool, weight: Meta | None,
    eps: float, offset: float, device: int,
) -> tuple[Launch, tuple[int | float, ...], int] | None:  # fmt: skip
    """Return the launch, its arguments after the pointers and how many partial rows it leaves; None if it cannot."""
    info = device_info(device)
    extra = 2 if silu else 1  # v's part of x is needed for silu only
    if found.grouped:
        x_extra, pieces, piece_heads = extra, found.kv_heads, found.q_heads // found.kv_heads + extra
    else:
        x_extra, pieces, piece_heads = 0, 1, found.q_heads + extra * found.kv_heads
    heads = found.q_heads + 2 * found.kv_heads + pieces * piece_heads
    stage = heads * found.head_dim * size + 256 // size * lanes + _STAGE_EXTRA
    teams = share_out(found.q_heads, found.kv_heads, lanes, stage, info.shared_per_block)
    if teams is None:
        return None
    inner, batch_inner = found.inner
    wide = int(weight is not None and weight[0] == torch.float32)
    arguments = (
        *strides, found.tokens, found.length, inner, int(batch_inner), found.batch_stride, found.place_stride,
        found.q_heads, found.kv_heads, *teams, *found.head_order(), x_extra, pieces, piece_heads, found.head_dim,
        lanes.bit_length() - 1, wide, eps, offset,
    )  # fmt: skip
    sums = 4 * found.head_dim * teams.teams * teams.groups(lanes)
    shared = max(teams.stages * stage + 16 * teams.most * teams.groups(lanes), sums)
    grid = min(found.tokens, info.sm_count)
    threads = 32 * (teams.teams * teams.warps + _HELPERS)
    return BWD_BULK.bind((t, pairs, silu), device, grid, threads, shared), arguments, grid
