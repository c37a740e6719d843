"""How the quantised normalisations are launched: kernel records, and from tensor metadata to launches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from rtkernels.ops.norm import norm_fp8_ring_plan as ring
from rtkernels.ops.norm.norm_fp8_shapes import outputs, smooth_outputs
from rtkernels.ops.shared.fp8_layout import GROUP, groups_of
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, WEIGHTED_TYPES, WIDTH, block_of, group_threads, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_ROW_THREADS = 512
_ROW_CHUNKS = 4
_STATS_THREADS = 512
_SMOOTH_VEC = 4  # elements per access

# One launch makes statistics and tiles together where x has at least so many bytes: less stays in L2 anyway.
_TOGETHER_BYTES = 24 << 20
# Tiles and blocks of statistics, per SM, between computing a row's statistics and using them.
_STATS_DISTANCE_PER_SM = 3
# A block computes statistics of 64 KB of x; if two rows per warp are more than that, of up to 128 KB.
_STATS_BYTES = 64 << 10
_MAX_STATS_BYTES = 128 << 10

_STATISTICS = "rstd:ptr mean:ptr"
_ROW = Kernel(
    "norm/norm_fp8.cu", "norm_fp8_row", template="T W CHUNKS CENTRED", max_registers=128,
    args="x:ptr residual:ptr weight:ptr bias:ptr q:ptr scale:ptr rstd_at:ptr mean_at:ptr y:ptr sum:ptr rows:i64 "
    "cols:i64 x_stride:i64 residual_stride:i64 threads_per_row:i64 scale_row:i64 scale_group:i64 pow2:i64 given:i64 "
    "eps:f64 offset:f64",
    variants=[(t, w, _ROW_CHUNKS, centred) for t, w in WEIGHTED_TYPES for centred in (False, True)],
)  # fmt: skip
_STATS = Kernel(
    "norm/norm_fp8.cu", "norm_fp8_stats", template="T VEC", max_registers=64,
    args=f"x:ptr residual:ptr sum:ptr {_STATISTICS} ticket:ptr rows:i64 all_rows:i64 cols:i64 x_stride:i64 "
    "residual_stride:i64 threads_per_row:i64 eps:f64",
    variants=[(t, vec) for t, v in WIDTH.items() for vec in (1, v)],
)  # fmt: skip
_TILE = Kernel(
    "norm/norm_fp8_tile.cu", "norm_fp8_tile", template="T ALIGNED16 ROWS COLUMNS CENTRED", max_registers=128,
    args=f"x:ptr weight:ptr bias:ptr {_STATISTICS} q:ptr scale:ptr q_t:ptr scale_t:ptr y:ptr ticket:ptr rows:i64 "
    "cols:i64 x_stride:i64 scale_row:i64 scale_group:i64 column_tiles:i64 weight_fp32:i64 x_is_older:i64 pow2:i64 "
    "stats_distance:i64 stats_blocks:i64 stats_rows:i64 eps:f64 offset:f64",
    variants=[
        (t, *rest)
        for t in WIDTH
        for rest in (
            (True, True, True, False),
            (True, False, True, False),
            (True, True, True, True),
            (False, True, True, True),
        )
    ],
)  # fmt: skip
_SMOOTH = Kernel(
    "norm/norm_fp8_smooth.cu", "norm_fp8_smooth", template="T VEC", max_registers=100,
    args=f"x:ptr residual:ptr weight:ptr bias:ptr smooth:ptr q:ptr scale:ptr {_STATISTICS} y:ptr sum:ptr max_abs:ptr "
    "rows:i64 cols:i64 x_stride:i64 residual_stride:i64 weight_fp32:i64 pow2:i64 gather:i64 eps:f64 offset:f64",
    variants=[(t, v) for t in WIDTH for v in (1, _SMOOTH_VEC)],
)  # fmt: skip
KERNELS = (_ROW, _STATS, _TILE, ring.RING, ring.SINGLE_READ, _SMOOTH)


class Normed(NamedTuple):
    """Metas and options of a call, as the operator has them."""

    x: Meta
    weight: Meta | None
    bias: Meta | None
    residual: Meta | None
    rstd: Meta | None
    mean: Meta | None
    eps: float
    offset: float
    layout: str
    pow2_scale: bool
    scale_layout: str
    keep: bool
    centred: bool


class _Rows(NamedTuple):
    """What the kernels are told of a call."""

    t: str  # x's type
    w: str  # that of the weight and the bias
    sizes: tuple[int, int, int, int]  # rows, columns, row strides of x and of the residual
    aligned: bool  # all rows begin at a multiple of 16 bytes
    scale_strides: tuple[int, int]  # of the scales of rows: from row to row, from group to group
    results: dict[str, str]  # names of those that are computed
    statistics: tuple[str | int, str | int]

    @property
    def vec(self) -> int:
        """Elements per access."""
        return WIDTH[self.t] if self.aligned else 1

    def at(self, *names: str) -> tuple[str | int, ...]:
        """Return the kernel's arguments for these results: 0 for those that are not computed."""
        return tuple(self.results.get(name, 0) for name in names)


def _described(given: Normed) -> _Rows:
    x, weight, bias, residual, rstd, *_ = given
    memory = outputs(x, residual, rstd, given.layout, given.scale_layout, given.keep, given.centred)
    size, cols = x.dtype.itemsize, x.shape[-1]
    sizes = x.rows, cols, x.row_stride, 0 if residual is None else residual.row_stride
    starts = misaligned(x, weight, bias, residual)
    aligned = vector_bytes(starts, cols * size, *(stride * size for stride in sizes[2:])) == 16
    w = DTYPE_TOKEN[(weight or bias or x).dtype]
    scale_strides = (1, x.rows) if given.scale_layout == "column" else (groups_of(cols), 1)
    found = _Rows(x.token, w, sizes, aligned, scale_strides, {name: name for name in memory}, ("rstd", "mean"))
    return found if rstd is not None else found._replace(statistics=("computed_rstd", *found.at("computed_mean")))


def plan(given: Normed, device: int, single_read: bool = True) -> Steps:
    """Return the one or two launches of a call. `single_read`: one may make both statistics and tiles."""
    found, layout = _described(given), given.layout
    rows, cols, x_stride, _ = found.sizes
    short = -(-cols // found.vec) <= _ROW_THREADS * _ROW_CHUNKS and rows < 1 << 31
    if layout in ("row", "none") and found.aligned and short:
        return Steps(_row_step(given, found, device))
    known = given.rstd is not None or given.residual is not None  # before the tiles begin
    matrix, plain = ring.Matrix(found.t, device, rows, cols, x_stride), not (given.centred or given.keep)
    options = {"weight_fp32": found.w != found.t, "pow2": int(given.pow2_scale), "offset": given.offset}
    if level():
        return _tile_steps(given, found, device)
    if known and found.aligned and plain and layout in ("transposed", "both") and ring.serves(matrix):
        return _ring_steps(given, found, matrix, options, device)
    alone = layout == "both" and found.aligned and single_read and not known and plain
    if alone and (blocks := ring.single_read_blocks(matrix)):
        tensors = "x", "weight", "computed_rstd", "q", "scale", "scale_t"
        two_passes = partial(plan, given, device, single_read=False)
        return ring.single_read_steps(
            matrix, blocks, found.scale_strides, tensors, eps=given.eps, two_passes=two_passes, **options
        )
    return _tile_steps(given, found, device)


def _row_step(given: Normed, found: _Rows, device: int) -> Step:
    """Return the launch that computes statistics and codes of rows together."""
    rows, cols, *_ = found.sizes
    vectors = -(-cols // found.vec)
    threads = max(group_threads(-(-vectors // _ROW_CHUNKS), _ROW_THREADS), GROUP // found.vec)
    block = block_of(threads)
    variant = found.t, found.w, _ROW_CHUNKS, given.centred
    launch = _ROW.bind(variant, device, -(-rows // (block // threads)), block)
    options = int(given.pow2_scale), given.rstd is not None, given.eps, given.offset
    results = *found.at("q", "scale"), *found.statistics, *found.at("y", "sum")
    return Step(
        launch, "x", "residual", "weight", "bias", *results, *found.sizes, threads, *found.scale_strides, *options
    )


def _ring_steps(given: Normed, found: _Rows, matrix: ring.Matrix, options: dict[str, Any], device: int) -> Steps:
    """Return the launches of tiles by a ring, after those of statistics where there is a residual."""
    after = given.residual is not None
    matrix = matrix._replace(stride=matrix.cols) if after else matrix  # the sum is dense
    tensors = "sum" if after else "x", "weight", found.statistics[0], *found.at("q", "scale"), "scale_t"
    by_rows = given.layout == "both"
    tiles = ring.ring_step(matrix, found.scale_strides, tensors, by_rows=by_rows, after=after, **options)
    stats = [_stats(found, found.sizes[0], 0, given.eps, device)] if after else []
    return Steps(*stats, tiles)


def _tile_steps(given: Normed, found: _Rows, device: int) -> Steps:
    """Return the launch of tiles, and before it that of statistics that are not given, at least of the first rows."""
    rows, cols, x_stride, _ = found.sizes
    t, aligned, groups, row_tiles = found.t, found.aligned, groups_of(cols), groups_of(rows)
    stats, ticket, distance, makers, stats_rows = [], 0, row_tiles, 0, 0
    if given.rstd is None:
        large = rows * cols * given.x.dtype.itemsize >= _TOGETHER_BYTES and not level()
        if aligned and given.residual is None and large:
            stats_rows = _stats_rows(cols * given.x.dtype.itemsize, GROUP // WIDTH[t] * 16 // 32)
            makers = GROUP // stats_rows
            distance = -(-_STATS_DISTANCE_PER_SM * device_info(device).sm_count // (groups + makers))
            if 2 * distance > row_tiles:
                distance, makers = row_tiles, 0
        ticket = "ticket" if makers and device < 0 else 0  # the emulator starts blocks in any order
        stats = [_stats(found, min(rows, distance * GROUP), ticket, given.eps, device)]
    variant = (t, True, given.layout != "transposed", True, False)
    if given.centred or not aligned:
        variant = (t, aligned, True, True, True)
    blocks = groups * row_tiles + makers * (row_tiles - distance)
    launch = _TILE.bind(variant, device, blocks, GROUP // WIDTH[t] * 16, overlap=given.rstd is None)
    source, stride = ("x", x_stride) if given.residual is None else ("sum", cols)
    results = *found.statistics, *found.at("q", "scale", "q_t", "scale_t", "y")
    numbers = (
        rows, cols, stride, *found.scale_strides, groups, found.w != t, given.residual is None, int(given.pow2_scale),
        distance, makers, stats_rows, given.eps, given.offset,
    )  # fmt: skip
    scratch = {"ticket": Memory((1,), torch.int32)} if ticket else {}
    return Steps(*stats, Step(launch, source, "weight", "bias", *results, ticket, *numbers), scratch=scratch)


def _stats(found: _Rows, first: int, ticket: str | int, eps: float, device: int) -> Step:
    """Return the launch for statistics of the `first` rows."""
    threads = group_threads(-(-found.sizes[1] // (4 * found.vec)), _STATS_THREADS)
    block = block_of(threads)
    launch = _STATS.bind((found.t, found.vec), device, -(-first // (block // threads)), block)
    tensors = "x", "residual", *found.at("sum"), *found.statistics, ticket
    return Step(launch, *tensors, first, *found.sizes, threads, eps)


def _stats_rows(row_bytes: int, warps: int) -> int:
    """Return the rows per block of the statistics kernel: a power of two, at least one per warp, at most 128."""
    rows = 2 * warps if 2 * warps * row_bytes <= _MAX_STATS_BYTES else warps
    while rows < GROUP and 2 * rows * row_bytes <= _STATS_BYTES:
        rows *= 2
    return rows


def plan_smooth(
    x: Meta, smooth: Meta, weight: Meta | None, bias: Meta | None, residual: Meta | None, eps: float, offset: float,
    pow2_scale: bool, keep: bool, calibrate: bool, centred: bool, device: int,
) -> Steps:  # fmt: skip
    memory = smooth_outputs(x, residual, keep, calibrate, centred)
    names = "q", "scale", "computed_rstd", "computed_mean", "y", "sum", "amax"
    names = [name if name in memory else 0 for name in names]
    t, size, rows, cols = x.token, x.dtype.itemsize, x.rows, x.shape[-1]
    x_stride, residual_stride = x.row_stride, 0 if residual is None else residual.row_stride
    starts = misaligned(x, smooth, weight, bias, residual)
    # fp32 vectors, too.
    aligned16 = vector_bytes(starts, cols * size, x_stride * size, residual_stride * size) == 16
    vec, info = _SMOOTH_VEC if aligned16 else 1, device_info(device)
    gather = calibrate and 4 * cols + 1024 <= info.shared_per_block
    threads = min(-(-cols // (32 * vec)) * 32, 256)
    grid = min(rows, (4 if calibrate else 64) * info.sm_count)
    launch = _SMOOTH.bind((t, vec), device, grid, threads, 4 * cols if gather else 0)
    weight_fp32 = (weight or bias or x).dtype != x.dtype
    numbers = rows, cols, x_stride, residual_stride, weight_fp32, int(pow2_scale), gather, eps, offset
    return Steps(Step(launch, "x", "residual", "weight", "bias", "smooth", *names, *numbers))
