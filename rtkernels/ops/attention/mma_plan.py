"""Attention by mma.sync, for every target from sm_80 on: kernel records and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.problem import Attention, Strides, key_gradients
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, float_halves
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

_TOKENS = ("bf16", "fp16")
_THREADS = 128
_LOG2E = 1.4426950408889634
_L2_BYTES = 24 << 20  # of keys and values that blocks work on at the same time
ANY_TYPE = {"bf16": 0, "fp16": 1, "fp32": 2}  # common/any_type.cuh


_SCORE_ARGUMENTS = (
    "bias_type:i64 bias_batch:i64 bias_head:i64 bias_row:i64 bias_column:i64 limit_batch:i64 left:i64 right:i64 "
    "scale_factor:i64 softcap_inverse:i64"
)
WALK_ARGUMENTS = (
    "pairs:i64 heads:i64 group:i64 tiles:i64 section:i64 lq:i64 lkv:i64 d_qk:i64 d_v:i64"  # blocks, and lengths
)


def stride_arguments(names: str) -> str:
    """Return the arguments of a kernel that are strides of these tensors: of sequences, rows and heads."""
    return " ".join(f"{name}_{of}:i64" for name in names.split() for of in ("batch", "row", "head"))


class Tiles(NamedTuple):
    """Widths up to which a kernel serves heads, 16-row blocks of queries per warp, keys of a tile."""

    d_qk: int
    d_v: int
    blocks: int
    keys: int


_FORWARD_TILES = (
    Tiles(64, 64, 2, 64),
    Tiles(80, 80, 2, 64),
    Tiles(96, 96, 2, 64),
    Tiles(128, 128, 2, 64),  # takes no bias
    Tiles(128, 128, 2, 32),
    Tiles(192, 128, 2, 32),
    Tiles(192, 192, 1, 32),
    Tiles(256, 256, 1, 32),
)


def _forward_tiles(target: Target) -> list[Tiles]:
    """Return the forward kernels of a target: from sm_100 on one of them would spill, and the next one serves."""
    return [t for t in _FORWARD_TILES if target.capability < (10, 0) or t != (128, 128, 2, 64)]


def gains_from_fp16(target: Target) -> bool:
    """Return True if products with sums in fp16 are faster: on consumer GPUs and their kin, twice as fast."""
    return target.capability in ((8, 6), (8, 9), (12, 0), (12, 1))


_FP16_TILES = (Tiles(64, 64, 2, 64), Tiles(128, 128, 1, 64))  # of kernels whose sums may be in fp16


_FWD = Kernel(
    "attention/attention_mma_fwd.cu", "attention_mma_fwd", template="T DQK DV MT BN SUMS", max_registers=255,
    struct=True, args="q:ptr k:ptr v:ptr sinks:ptr bias:ptr lengths:ptr kv_limit:ptr cu_q:ptr cu_k:ptr out:ptr lse:ptr "
    f"{WALK_ARGUMENTS} {stride_arguments('q k v out')} lse_batch:i64 lse_head:i64 {_SCORE_ARGUMENTS}",
    variants=lambda target: [(t, *tiles, 0) for t in _TOKENS for tiles in _forward_tiles(target)]
    + [("fp16", *tiles, sums) for tiles in _FP16_TILES for sums in (1, 2, 3) if gains_from_fp16(target)],
)  # fmt: skip


class GradTiles(NamedTuple):
    """Widths up to which a backward kernel serves heads, rows of the tiles that it walks over."""

    d_qk: int
    d_v: int
    rows: int


_GRAD_TILES = (
    GradTiles(64, 64, 64),
    GradTiles(80, 80, 64),
    GradTiles(96, 96, 64),
    GradTiles(128, 128, 64),
    GradTiles(192, 128, 32),
    GradTiles(192, 192, 32),
    GradTiles(256, 256, 16),
)
_APART = 257  # of both widths together: from here on dk and dv do not fit into the registers of one kernel
_GRAD_ROWS = 64  # of a block
_GRAD_STRIDES = f"{stride_arguments('q k v dout')} lse_batch:i64 lse_head:i64 count:i64 {_SCORE_ARGUMENTS}"
_GRAD_NUMBERS = f"{WALK_ARGUMENTS} {_GRAD_STRIDES}"
_GRAD_TENSORS = "q:ptr k:ptr v:ptr dout:ptr stats:ptr bias:ptr lengths:ptr kv_limit:ptr cu_q:ptr cu_k:ptr"
_GRAD_UNIT = "attention/attention_mma_bwd.cu"
_STATS = Kernel(
    _GRAD_UNIT, "attention_mma_stats", template="T", max_registers=64,
    args=f"out:ptr dout:ptr lse:ptr dlse:ptr cu_q:ptr stats:ptr lq:i64 d_v:i64 {stride_arguments('out dout')} "
    "lse_batch:i64 lse_head:i64 count:i64",
    variants=[(t,) for t in _TOKENS],
)  # fmt: skip
_DSINKS = Kernel(
    _GRAD_UNIT, "attention_mma_dsinks", template="T", max_registers=64,
    args="sinks:ptr stats:ptr cu_q:ptr dsinks:ptr batch:i64 lq:i64 lse_batch:i64 lse_head:i64 count:i64",
    variants=[("fp32",)],
)  # fmt: skip
_DQ = Kernel(
    _GRAD_UNIT, "attention_mma_dq", template="T DQK DV BN", max_registers=255, struct=True,
    args=f"{_GRAD_TENSORS} dq:ptr {stride_arguments('dq')} {_GRAD_NUMBERS}",
    variants=[(t, *tiles) for t in _TOKENS for tiles in _GRAD_TILES],
)  # fmt: skip
_DKV = Kernel(
    _GRAD_UNIT, "attention_mma_dkv", template="T DQK DV BQ PARTS", max_registers=255, struct=True,
    args=f"{_GRAD_TENSORS} dk:ptr dv:ptr {stride_arguments('dk dv')} {_GRAD_NUMBERS}",
    variants=[
        (t, *tiles, parts)
        for t in _TOKENS
        for tiles in _GRAD_TILES
        for parts in ((3,) if tiles.d_qk + tiles.d_v <= _APART else (1, 2))
    ],
)  # fmt: skip
_BIAS_TILES = ((64, 64), (128, 64), (256, 16))  # widths of heads, keys
_DBIAS = Kernel(
    "attention/attention_mma_dbias.cu", "attention_mma_dbias", template="T D BN", max_registers=255, struct=True,
    args="q:ptr k:ptr v:ptr dout:ptr stats:ptr bias:ptr lengths:ptr kv_limit:ptr dbias:ptr batch:i64 heads:i64 "
    f"group:i64 bias_batches:i64 bias_heads:i64 lq:i64 lkv:i64 d_qk:i64 d_v:i64 {_GRAD_STRIDES}",
    variants=[(t, *tiles) for t in _TOKENS for tiles in _BIAS_TILES],
)  # fmt: skip
KERNELS = (_FWD, _STATS, _DSINKS, _DQ, _DKV, _DBIAS)


def unsupported(problem: Attention, target: Target) -> str | None:
    """Return why these kernels cannot serve a problem, None if they can."""
    backward = problem.backward
    aligned = (problem.q, problem.k, problem.v, problem.dout) if backward else (problem.q, problem.k, problem.v)
    if not all(strides is None or strides.aligned for strides in aligned):
        return "q, k or v is not aligned to 16 bytes"
    if max(problem.batch, problem.heads_q) > 65535 and backward:
        return "there are more than 65535 sequences or heads"
    if max(problem.d_qk, problem.d_v) > 256 or problem.d_qk % 8 or problem.d_v % 8:
        return "heads are wider than 256 or not a multiple of 8"
    return None


def tile_pitch(columns: int) -> int:
    """Return the bytes of a row of a tile in shared memory (MmaTile in mma_tile.cuh)."""
    return columns * 2 + (0 if columns % 64 == 0 else 16)


def chosen(tiles: Sequence[Any], problem: Attention) -> Any:
    """Return the first kernel that is large enough."""
    return next(t for t in tiles if problem.d_qk <= t.d_qk and problem.d_v <= t.d_v)


def _takes_bias(tiles: Tiles) -> bool:
    return tiles.blocks * tiles.d_v * tiles.keys < 2 * 128 * 64  # attention_mma_fwd.cu


def bias_arguments(problem: Attention) -> tuple[int, ...]:
    """Return element type and strides of the bias as kernels take them."""
    bias = problem.bias
    return (0, 0, 0, 0, 0) if bias is None else (ANY_TYPE[bias.token], *bias[1:5])


def score_arguments(problem: Attention) -> tuple[int, int]:
    """Return the parameters of scores (ScoreRule in scores.cuh) as pairs of floats."""
    plain = problem.softcap == 0.0 and problem.bias is None
    inverse = problem.scale / problem.softcap if problem.softcap else 0.0
    factor = problem.scale * _LOG2E if plain else _LOG2E
    return float_halves(problem.scale, factor), float_halves(problem.softcap, inverse)


def _three(strides: Strides) -> tuple[int, int, int]:
    return strides.batch, strides.row, strides.head


def steps_fp16(sums: int) -> Callable[[Attention, int], Steps]:
    """Return ``steps`` for sums in fp16."""
    return lambda problem, device: _steps_forward(problem, device, sums)


def steps(problem: Attention, device: int) -> Steps:
    """Return the launches of a problem that is not ``unsupported``."""
    return _steps_backward(problem, device) if problem.backward else _steps_forward(problem, device)


def summary(problem: Attention, target: Target) -> str:
    """Return the tile of a forward pass, for ``explain``."""
    tile = _forward_tile(problem, target)
    return "" if problem.backward else f"{64 * tile.blocks} queries x {tile.keys} keys"


def _forward_tile(problem: Attention, target: Target) -> Tiles:
    tiles = _forward_tiles(target)
    if level():  # as many keys in a tile as for paged caches
        keys = 64 if max(problem.d_qk, problem.d_v) <= 64 else 32
        tiles = [t for t in tiles if t.keys == keys]
    return chosen([t for t in tiles if problem.bias is None or _takes_bias(t)], problem)


def fp16_unsupported(problem: Attention, info: DeviceInfo) -> str | None:
    """Return why the forward pass of a problem cannot have sums in fp16, None if it can."""
    if problem.token != "fp16":
        return f"operands are {problem.token}; expected float16 for sums in fp16"
    if not gains_from_fp16(info.target):
        return f"products of {info.target} take as long with sums in fp32 as in fp16; expected acc='fp32'"
    if problem.backward or max(problem.d_qk, problem.d_v) > 128:
        return "heads are wider than 128, or gradients are wanted"
    return unsupported(problem, info.target)


def _steps_forward(problem: Attention, device: int, sums: int = 0) -> Steps:
    """Return the launches of a forward pass; `sums`: bits of the products whose sums are fp16."""
    config = chosen(_FP16_TILES, problem) if sums else _forward_tile(problem, device_info(device).target)
    rows = 64 * config.blocks
    shared = rows * tile_pitch(config.d_qk) + 2 * config.keys * (tile_pitch(config.d_qk) + tile_pitch(config.d_v))
    tiles, pairs = -(-problem.lq // rows), problem.batch * problem.heads_q
    if tiles * pairs == 0:
        return Steps()
    check_tiles(tiles, pairs, problem.lq)
    section = _section(problem, pairs, problem.group)
    return Steps(
        Step(
            _FWD.bind((problem.token, *config, sums), device, tiles * pairs, _THREADS, shared),
            *("q", "k", "v", "sinks", "bias", "lengths", "kv_limit", "cu_q", "cu_k", "out", "lse"),
            *(pairs, problem.heads_q, problem.group, tiles, section, problem.lq, problem.lkv),
            *(problem.d_qk, problem.d_v, *_three(problem.q), *_three(problem.k), *_three(problem.v)),
            *(*_three(problem.out), *problem.lse_strides(), *bias_arguments(problem), problem.kv_limit or 0),
            *(problem.left, problem.right, *score_arguments(problem)),
        )
    )


def check_tiles(tiles: int, pairs: int, lq: int) -> None:
    """Raise a ValueError unless there are fewer tiles than a grid can have blocks."""
    if tiles * pairs > GRID_LIMIT:
        raise ValueError(f"attention of {pairs} heads of {lq} queries; expected fewer than 2^31 tiles")


def head_section(bytes_per_key: int, lkv: int, pairs: int, group: int) -> int:
    """Return the number of heads to process at the same time, so that the data they share stays in L2."""
    return min(max(_L2_BYTES // (bytes_per_key * max(lkv, 1)), 1) * group, pairs)


def _section(problem: Attention, pairs: int, group: int) -> int:
    return head_section(2 * (problem.d_qk + problem.d_v), problem.lkv, pairs, group)


def _steps_backward(problem: Attention, device: int) -> Steps:
    """Return the launches of a backward pass."""
    p, config = problem, chosen(_GRAD_TILES, problem)
    count = p.batch * p.heads_q * p.lq if not p.varlen else p.heads_q * p.total_q
    numbers = (
        *(*_three(p.q), *_three(p.k), *_three(p.v), *_three(p.dout), *p.lse_strides(), count),
        *(*bias_arguments(p), p.kv_limit or 0, p.left, p.right, *score_arguments(p)),
    )
    scratch, steps = {"stats": Memory((2, count), torch.float32)}, []
    if p.lq:
        steps.append(_stats_step(p, count, device))
    if "q" in p.wants and p.lq:
        steps.append(_dq_step(p, config, numbers, device))
    if ("k" in p.wants or "v" in p.wants) and p.lkv:
        of_keys, unwanted = _dkv_steps(p, config, numbers, device)
        steps, scratch = [*steps, *of_keys], scratch | unwanted
    if "b" in p.wants and p.bias and p.lq and p.lkv:
        steps.append(_dbias_step(p, numbers, device))
    if "s" in p.wants and p.sinks:
        launch = _DSINKS.bind(("fp32",), device, p.heads_q, 256)
        sizes = p.batch, p.lq, *p.lse_strides(), count
        steps.append(Step(launch, "sinks", "stats", "cu_q", "dsinks", *sizes))
    return Steps(*steps, scratch=scratch)


_GRAD_NAMES = ("q", "k", "v", "dout", "stats", "bias", "lengths", "kv_limit", "cu_q", "cu_k")


def _grad_shared(config: GradTiles) -> int:
    return (_GRAD_ROWS + 2 * config.rows) * (tile_pitch(config.d_qk) + tile_pitch(config.d_v))


def _sizes(p: Attention) -> tuple[int, int, int, int]:
    return p.lq, p.lkv, p.d_qk, p.d_v


def _stats_step(p: Attention, count: int, device: int) -> Step:
    """Return the launch that computes, for each row, lse and the dot product of dout and out."""
    launch = _STATS.bind((p.token,), device, (-(-p.lq // 4), p.heads_q, p.batch), 128)
    strides = *_three(p.out), *_three(p.dout), *p.lse_strides()
    return Step(launch, "out", "dout", "lse", "dlse", "cu_q", "stats", p.lq, p.d_v, *strides, count)


def _dq_step(p: Attention, config: GradTiles, numbers: Sequence[int], device: int) -> Step:
    tiles, pairs = -(-p.lq // _GRAD_ROWS), p.batch * p.heads_q
    launch = _DQ.bind((p.token, *config), device, tiles * pairs, _THREADS, _grad_shared(config))
    walk = pairs, p.heads_q, p.group, tiles, _section(p, pairs, p.group), *_sizes(p)
    return Step(launch, *_GRAD_NAMES, "dq", *_three(p.dq), *walk, *numbers)


def _dkv_steps(
    p: Attention, config: GradTiles, numbers: Sequence[int], device: int
) -> tuple[list[Step], dict[str, Memory]]:
    """Return the launches for dk and dv, and scratch; a single kernel if both fit into its registers."""
    tiles, pairs = -(-p.lkv // _GRAD_ROWS), p.batch * p.heads_kv
    parts, to, scratch = [part for part, letter in ((1, "k"), (2, "v")) if letter in p.wants], ("dk", "dv"), {}
    if config.d_qk + config.d_v <= _APART:
        parts = [3]
        to, scratch = key_gradients(p)
    walk = pairs, p.heads_q, p.group, tiles, _section(p, pairs, 1), *_sizes(p)
    steps = []
    for part in parts:
        launch = _DKV.bind((p.token, *config, part), device, tiles * pairs, _THREADS, _grad_shared(config))
        steps.append(Step(launch, *_GRAD_NAMES, *to, *_three(p.dk), *_three(p.dv), *walk, *numbers))
    return steps, scratch


def _dbias_step(p: Attention, numbers: Sequence[int], device: int) -> Step:
    width, keys = next(w for w in _BIAS_TILES if max(p.d_qk, p.d_v) <= w[0])
    matrices = p.bias.batches * p.bias.heads
    grid = (-(-p.lkv // keys), -(-p.lq // _GRAD_ROWS), matrices)
    if max(grid[1:]) > 65535:
        raise ArgumentError(f"bias has {matrices} matrices; expected up to 65535 for a gradient")
    launch = _DBIAS.bind((p.token, width, keys), device, grid, _THREADS, 2 * (_GRAD_ROWS + keys) * tile_pitch(width))
    walk = p.batch, p.heads_q, p.group, p.bias.batches, p.bias.heads, *_sizes(p)
    return Step(launch, *_GRAD_NAMES[:8], "dbias", *walk, *numbers)
