"""Forward attention with wgmma and TMA (sm_90a): kernel, tiles and launch."""

from __future__ import annotations

import math
from typing import NamedTuple

from rtkernels.ops.attention.problem import Attention, Strides
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Step, Steps, box_strides

KINDS = {None: 0, "bf16": 1, "fp16": 2, "fp32": 3}  # of sinks and bias, for the kernels
_L2_BYTES = 24 << 20  # of keys and values that heads whose tiles are worked on together may have


class Tile(NamedTuple):
    """A tile of the forward: padded widths of q and v, keys in a tile, warpgroups of 64 queries."""

    d_qk: int
    d_v: int
    keys: int
    groups: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: q, two stages of keys and values, barriers, and what alignment costs."""
        row_qk, row_v = -(-self.d_qk // 64) * 128, -(-self.d_v // 64) * 128
        return 64 * self.groups * row_qk + 2 * self.keys * (row_qk + row_v) + 256 + 1024


# The first one that fits is taken.
TILES = (
    Tile(64, 64, 128, 3),
    Tile(96, 96, 128, 2),
    Tile(128, 128, 176, 2),
    Tile(192, 128, 128, 2),
    Tile(192, 192, 112, 2),
    Tile(256, 256, 80, 2),
)
INVARIANT_TILE = Tile(128, 128, 128, 2)  # with batch invariance: the keys of a tile are those of paged caches
# Where scores are made element by element, with a bias and without one; there are no registers for a bias in the last.
BIAS_TILES = (Tile(64, 64, 128, 2), Tile(128, 128, 96, 2))
EXTRA_TILES = (*BIAS_TILES, Tile(256, 256, 80, 2))

FORWARD = Kernel(
    "attention/attention_sm90_fwd.cu", "attention_sm90_fwd", template="T DQK DV BN kGroups EXTRAS", max_registers=168,
    struct=True,
    needs=("wgmma",),
    args="q_map:tmap k_map:tmap v_map:tmap out:ptr lse:ptr sinks:ptr bias:ptr lengths:ptr kv_limit:ptr cu_q:ptr "
    "cu_k:ptr counter:ptr batches:i64 heads:i64 heads_per_kv:i64 lq:i64 lkv:i64 d_v:i64 out_batch:i64 out_row:i64 "
    "out_head:i64 lse_batch:i64 lse_head:i64 left:i64 right:i64 heads_together:i64 bundle:i64 rows:i64 sinks_kind:i64 "
    "bias_kind:i64 bias_batch:i64 bias_head:i64 bias_row:i64 bias_column:i64 limit_batch:i64 scale:f64 softcap:f64",
    variants=[
        (t, *tile, extras)
        for t in ("bf16", "fp16")
        for extras, tiles in ((0, (*TILES, INVARIANT_TILE)), (1, EXTRA_TILES[-1:]), (2, BIAS_TILES))
        for tile in tiles
    ],
)  # fmt: skip


def rows_map(
    problem: Attention, name: str, heads: int, width: int, box_rows: int, strides: Strides, bundle: int = 1
) -> Boxes:
    """Return the tensor map of q, k or v (or a gradient) in boxes of `box_rows` rows and 64 columns.

    Boxes of a `bundle` have so many heads as well; heads then come before rows.
    """
    p = problem
    of_q = name not in ("k", "v")
    rows = (p.total_q if of_q else p.total_k) if p.varlen else (p.lq if of_q else p.lkv)
    dims = [(rows, strides.row, box_rows), (heads, strides.head, bundle)]
    if bundle > 1:
        dims.reverse()
    sizes, steps, box = zip(*dims, (1 if p.varlen else p.batch, strides.batch, 1), strict=True)
    return Boxes(name, p.token, (width, *sizes), box_strides((width, *sizes), steps, 2), (64, *box))


def extras(problem: Attention) -> bool:
    """Return whether scores are computed element by element."""
    p = problem
    return p.softcap != 0 or p.bias is not None or p.kv_limit is not None or not p.scale > 0


def forward_tile(problem: Attention) -> tuple[Tile, int]:
    """Return the tile of a problem, and the optional features of its kernel (EXTRAS)."""
    p = problem
    tiles = EXTRA_TILES if extras(p) else TILES
    tile = min((t for t in tiles if t.d_qk >= p.d_qk and t.d_v >= p.d_v), key=lambda t: t.d_qk + t.d_v)
    if level() and tiles is TILES and 64 < max(p.d_qk, p.d_v) <= 128:
        tile = INVARIANT_TILE
    return tile, 0 if not extras(p) else 2 if tile in BIAS_TILES else 1


def heads_in_l2(pairs: int, bytes_of_a_head: float, alike: bool) -> int:
    """Return the number of heads to process together: as many as have their keys and values in L2.

    Where all tiles take as long (`alike`), one by one is as good and has the fewest keys in use.
    """
    return 1 if alike else max(1, min(pairs, int(_L2_BYTES / max(bytes_of_a_head, 1))))


def heads_together(problem: Attention, bundle: int = 1) -> int:
    """Return ``heads_in_l2`` of a problem, in bundles of heads that share keys."""
    p = problem
    each = 2 * p.lkv * (p.d_qk + p.d_v) / p.group * bundle
    return heads_in_l2(p.batch * p.heads_q // bundle, each, p.right < 0 and p.left < 0 and not p.varlen)


def bundle_of(problem: Attention, tile: Tile) -> int:
    """Return how many heads that share keys are rows of one tile: those with the fewest tiles, if that saves a tenth.

    It is 1 with sinks, where the kernel has no registers to spare, and with batch invariance, since rows of a warp are
    rescaled together.
    """
    p = problem
    if p.group == 1 or p.sinks is not None or extras(p) or tile.d_v == 256 or level():
        return 1
    rows = 64 * tile.groups
    bundles = [n for n in range(1, min(p.group, rows) + 1) if p.group % n == 0]
    tiles = {n: math.ceil(p.lq / (rows // n)) * (p.heads_q // n) for n in bundles}
    best = min(bundles, key=lambda n: (tiles[n], n))
    return best if tiles[best] <= 0.9 * tiles[1] else 1


def bias_arguments(problem: Attention) -> tuple[int, ...]:
    """Return the kind and the strides of a bias."""
    b = problem.bias
    return (0, 0, 0, 0, 0) if b is None else (KINDS[b.token], b.batch, b.head, b.row, b.column)


def steps_forward(problem: Attention, device: int) -> Steps:
    """Return the launches: out and lse of a problem that is not ``unsupported``."""
    p, (tile, more) = problem, forward_tile(problem)
    if 0 in (p.batch, p.heads_q, p.lq) or p.rows_q == 0:
        return Steps()
    bundle = bundle_of(p, tile)
    rows = 64 * tile.groups // bundle
    tiles = p.batch * (p.heads_q // bundle) * math.ceil(p.lq / rows)
    blocks = min(device_info(device).sm_count, tiles)
    counter = "counter" if blocks < tiles else 0
    launch = FORWARD.bind((p.token, *tile, more), device, blocks, 128 * (tile.groups + 1), tile.shared)
    kv_rows = tile.keys
    step = Step(
        launch,
        rows_map(p, "q", p.heads_q, p.d_qk, rows, p.q, bundle),
        rows_map(p, "k", p.heads_kv, p.d_qk, kv_rows, p.k),
        rows_map(p, "v", p.heads_kv, p.d_v, kv_rows, p.v),
        "out", "lse", "sinks", "bias", "lengths", "kv_limit", "cu_q", "cu_k", counter,
        p.batch, p.heads_q, p.group, p.lq, p.lkv, p.d_v, *p.out[:3], *p.lse_strides(), p.left, p.right,
        heads_together(p, bundle), bundle, rows, KINDS[p.sinks], *bias_arguments(p), p.kv_limit or 0, float(p.scale),
        float(p.softcap),
    )  # fmt: skip
    return Steps(step, zeros={"counter": 1} if counter else None)
