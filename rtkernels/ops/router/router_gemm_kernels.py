"""The kernels of the router's products, how operands are cut into 16-bit terms, and how work is cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rtkernels.ops.router import router_gemm_tiles as tiles
from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.arguments import Among

FAST, HIGH, EXACT = 0, 1, 2
PRECISIONS = {"fast": FAST, "high": HIGH, "exact": EXACT}
PRECISION = Among(PRECISIONS, f"one of {', '.join(map(repr, PRECISIONS))}")

TILE = 128  # of the result: rows and columns of a block
DEPTH = 64  # of the summed dimension per stage
_THREADS = 384
_MMA_THREADS = 256
_TERM_THREADS = 128
_SUM_THREADS = 256
_SLACK = 1024 + 256  # shared memory: alignment of the tiles, and barriers
_TILE_BYTES = TILE * DEPTH * 2
_MIN_BLOCKS = 4  # of DEPTH per split: fewer cost more to add up than they save
_PINGPONG_EXPERTS = 64  # of a tile of router_dw_pingpong
_PINGPONG_COLUMNS = 256
_PINGPONG_STAGE = 32
# Tokens of a split, or fewer. Half of them stay in the tensor cores: 3.3e-6 of the 5e-6 that "high" promises.
_PINGPONG_TOKENS = 2048
_PINGPONG_SHARED = 8 * _PINGPONG_STAGE * (4 * _PINGPONG_EXPERTS + 2 * _PINGPONG_COLUMNS) + _SLACK

_MMA_SHARED = 3 * 2 * _TILE_BYTES

SPLIT = Kernel(
    "router/router_gemm_terms.cu", "router_split", template="In T", max_registers=64,
    args="in:ptr out:ptr scale:ptr column_largest:ptr rows:i64 cols:i64 stride:i64 pitch:i64 terms:i64 "
    "aligned16:i64",
    variants=[("fp32", "bf16"), ("fp16", "bf16"), ("fp32", "fp16"), ("bf16", "fp16")],
)  # fmt: skip
SUM = Kernel(
    "router/router_gemm_terms.cu", "router_sum", template="T", max_registers=48,
    args="partial:ptr out:ptr bias:ptr count:i64 step:i64 cols:i64 splits:i64 accumulate:i64 aligned16:i64",
    variants=TYPES,
)  # fmt: skip
MMA = Kernel(
    "router/router_gemm_mma.cu", "router_mma", template="T ACROSS_A ACROSS_B", max_registers=255,
    args="a:ptr b:ptr out:ptr bias:ptr scale:ptr m:i64 n:i64 k:i64 a_pitch:i64 b_pitch:i64 a_step:i64 b_step:i64 "
    "pairs:i64 pair_count:i64 blocks_per_split:i64 promote:i64 kind:i64 scale_by_row:i64",
    variants=[
        ("bf16", False, False),
        ("fp16", False, False),
        ("bf16", False, True),
        ("bf16", True, True),
        ("fp16", True, True),
    ],
)  # fmt: skip
FWD = Kernel(
    "router/router_gemm_fwd.cu", "router_fwd", template="T GROUPS COLUMNS", max_registers=168, needs=("tma", "wgmma"),
    args="x:tmap weight:tmap out_map:tmap out:ptr bias:ptr scale:ptr rows:i64 experts:i64 depth:i64 x_rows:i64 "
    "weight_rows:i64 term_count:i64 stage_count:i64 split_count:i64 promote:i64 by_copy_engine:i64",
    variants=[(token, rows // 64, columns) for token in ("bf16", "fp16") for rows, columns in tiles.TILES],
)  # fmt: skip
DX = Kernel(
    "router/router_gemm_dx.cu", "router_dx", template="LEFT RIGHT", max_registers=168, needs=("tma", "wgmma"),
    args="dy:tmap weight:tmap dx:tmap experts:i64 depth:i64 parts:i64 tiles_each:i64 half:i64",
    variants=[(1, 1), (2, 1), (2, 2)],
)  # fmt: skip
DW = Kernel(
    "router/router_gemm_dw.cu", "router_dw", template="T TERMS", max_registers=168, needs=("tma", "wgmma"),
    args="dy:tmap x:tmap out:ptr largest:ptr tokens:i64 experts:i64 depth:i64 blocks_per_split:i64 promote:i64",
    variants=[("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp16", 1), ("fp16", 2)],
)  # fmt: skip
DW_PINGPONG = Kernel(
    "router/router_gemm_dw_pingpong.cu", "router_dw_pingpong", template="T TERMS", max_registers=168,
    needs=("tma", "wgmma"),
    args="dy:tmap x:tmap out:ptr tokens:i64 experts:i64 depth:i64 stages_per_split:i64", variants=[("bf16", 2)],
)  # fmt: skip
KERNELS = (SPLIT, SUM, MMA, FWD, DX, DW, DW_PINGPONG)


# ---- numerics -------------------------------------------------------------------------------------------------------


def terms(token: str, into: str, precision: int) -> int:
    """Return how many terms of type `into` stand for a number of type `token`."""
    if token == into or precision == FAST:
        return 1
    if into == "bf16":  # 8 bits each
        return {"fp16": 2, "fp32": 3 if precision == EXACT else 2}[token]
    return 2 if token == "fp32" else 1  # fp16 with a scale: 11 bits each, and bf16 has 8


def input_gradient_terms(token: str, precision: int) -> int:
    """Return how many bf16 terms stand for dy, and for a weight that is not bf16, where x has type `token`.

    They are bf16 for every x, because a gradient may be too small or too large for fp16. One has as many bits as a bf16
    dx; an fp16 dx has 11 and needs two, in "fast" too. Three would be lost in the rounding of dx.
    """
    return 1 if precision == FAST and token == "bf16" else 2


def promote_blocks(precision: int) -> int:
    """Return after how many blocks of the summed dimension sums leave the tensor cores, which drop low bits."""
    return {FAST: 1 << 30, HIGH: 8, EXACT: 2}[precision]


def term_pairs(left: int, right: int) -> list[tuple[int, int]]:
    """Return which terms of two operands meet, smallest products first; small ones do not meet small ones."""
    terms = max(left, right)
    pairs = [(i, j) for i in range(left) for j in range(right) if i + j < terms]
    return sorted(pairs, key=lambda pair: -sum(pair))


def packed_pairs(pairs: Sequence[tuple[int, int]]) -> int:
    """Return pairs in the form that the mma.sync kernel takes."""
    return sum((i | j << 2) << 4 * place for place, (i, j) in enumerate(pairs))


# ---- work -----------------------------------------------------------------------------------------------------------


def uses_wgmma(device: int) -> bool:
    """Return True if the sm_90a kernels serve a device."""
    return FWD.supports(device_info(device).target)


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _splits(device: int, tile_count: int, depth: int) -> tuple[int, int]:
    """Return in how many parts the summed dimension is cut to keep all SMs busy, and blocks in each."""
    blocks = _up(depth, DEPTH)
    wanted = max(1, min(device_info(device).sm_count // tile_count, blocks // _MIN_BLOCKS))
    each = _up(blocks, wanted)
    return _up(blocks, each), each


def forward_launch(
    device: int, token: str, count: int, rows: int, experts: int, depth: int, after_split: bool
) -> tuple[Launch, tiles.Tile]:
    tile = tiles.forward_tile((choice_rows(rows), experts, depth), count, device_info(device).sm_count)
    groups = tile.rows // 64  # warpgroups that multiply, besides the one that fetches
    grid = _up(rows, tile.rows) * _up(experts, tile.columns) * tile.splits
    shared = tile.stages * tiles.ROW_BYTES * (tile.rows + count * tile.columns) + _SLACK
    variant, threads = (token, groups, tile.columns), 128 * (groups + 1)
    launch = FWD.bind(variant, device, grid, threads, shared, overlap=after_split, cluster=tile.splits)
    return launch, tile


def input_gradient_launch(device: int, left: int, right: int, rows: int, depth: int, after_split: bool):
    row_tiles, column_tiles = _up(rows, TILE), _up(depth, TILE)
    each = _up(column_tiles, max(1, min(column_tiles, device_info(device).sm_count // row_tiles)))
    parts = _up(column_tiles, each)
    shared = (4 * 2 + 6) * _TILE_BYTES + _SLACK
    return DX.bind((left, right), device, row_tiles * parts, _THREADS, shared, overlap=after_split), parts, each


class DwPlan(NamedTuple):
    """How the weight's gradient is computed."""

    launch: Launch
    splits: int
    each: int  # stages of a split
    stage_tokens: int
    pingpong: bool  # by the kernel whose warpgroups take every other stage


def weight_gradient_launch(
    device: int, token: str, count: int, tokens: int, experts: int, depth: int, after_other: bool
) -> DwPlan:
    if (token, count) == ("bf16", 2):
        blocks = _up(experts, _PINGPONG_EXPERTS) * _up(depth, _PINGPONG_COLUMNS)
        splits, each = _splits(device, blocks, tokens)
        if each * DEPTH <= _PINGPONG_TOKENS:
            launch = DW_PINGPONG.bind(
                (token, count), device, (blocks, splits), _THREADS, _PINGPONG_SHARED, overlap=after_other
            )
            return DwPlan(launch, splits, each * DEPTH // _PINGPONG_STAGE, _PINGPONG_STAGE, True)
    blocks = _up(experts, TILE) * _up(depth, TILE)
    splits, each = _splits(device, blocks, tokens)
    shared = 4 * 3 * _TILE_BYTES + _SLACK
    launch = DW.bind((token, count), device, (blocks, splits), _THREADS, shared, overlap=after_other)
    return DwPlan(launch, splits, each, DEPTH, False)


def mma_launch(device: int, token: str, across_a: bool, across_b: bool, m: int, n: int, k: int, splits_allowed: bool):
    blocks = _up(m, TILE) * _up(n, TILE)
    splits, each = _splits(device, blocks, k) if splits_allowed else (1, _up(k, DEPTH))
    launch = MMA.bind((token, across_a, across_b), device, (blocks, splits), _MMA_THREADS, _MMA_SHARED)
    return launch, splits, each


def split_launch(device: int, source: str, into: str, rows: int, cols: int, by_row: bool):
    # To scale by row every block has to read it whole.
    blocks = 1 if by_row else min(_up(cols, 8 * _TERM_THREADS), 65535)
    return SPLIT.bind((source, into), device, (rows, blocks), _TERM_THREADS)


def sum_launch(device: int, token: str, count: int) -> Launch:
    """Return the launch that adds up `count` numbers of several splits."""
    return SUM.bind((token,), device, _up(count, 4 * _SUM_THREADS), _SUM_THREADS, overlap=True)
