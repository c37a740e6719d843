"""How the quantised normalisations are launched: kernel records, and from tensor metadata to launches."""

from __future__ import annotations

from functools import partial

import torch

from rtkernels.ops.norm import norm_fp8_ring_plan as ring
from rtkernels.ops.norm.norm_fp8_shapes import outputs, smooth_outputs
from rtkernels.ops.shared.fp8_layout import GROUP, groups_of
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
# Tiles and makers of statistics between the making of a row's statistics and their use, per multiprocessor.
_STATS_DISTANCE_PER_SM = 3
# A block computes statistics of 64 KB of x; if two rows per warp are more than that, of up to 128 KB.
_STATS_BYTES = 64 << 10
_MAX_STATS_BYTES = 128 << 10

_STATISTICS = "rstd:ptr mean:ptr"
_ROW = Kernel(
    "norm/norm_fp8.cu", "norm_fp8_row", template="T W CHUNKS CENTRED", max_registers=128,
    args=f"x:ptr residual:ptr weight:ptr bias:ptr q:ptr scale:ptr {_STATISTICS} y:ptr sum:ptr rows:i64 cols:i64 "
    "x_stride:i64 residual_stride:i64 threads_per_row:i64 scale_row:i64 scale_group:i64 pow2:i64 given:i64 eps:f64 "
    "offset:f64",
    variants=[(t, w, _ROW_CHUNKS, centred) for t, w in WEIGHTED_TYPES for centred in (False, True)],
)  # fmt: skip
_STATS = Kernel(
    "norm/norm_fp8.cu", "norm_fp8_stats", template="T VEC CENTRED", max_registers=64,
    args=f"x:ptr residual:ptr sum:ptr {_STATISTICS} ticket:ptr rows:i64 all_rows:i64 cols:i64 x_stride:i64 "
    "residual_stride:i64 threads_per_row:i64 eps:f64",
    variants=[(t, *rest) for t, v in WIDTH.items() for rest in ((1, True), (v, False), (v, True))],
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


def plan(
    x: Meta, weight: Meta | None, bias: Meta | None, residual: Meta | None, rstd: Meta | None, mean: Meta | None,
    eps: float, offset: float, layout: str, pow2_scale: bool, scale_layout: str, keep: bool, centred: bool,
    device: int, single_read: bool = True,
) -> Steps:  # fmt: skip
    """Return the one or two launches of a call. `single_read`: one may make both statistics and tiles."""
    two_passes = partial(plan, **locals() | {"single_read": False})
    made = outputs(x, residual, rstd, layout, scale_layout, keep, centred)

    def at(name: str) -> str | int:
        return name if name in made else 0

    t, size, pow2 = x.token, x.dtype.itemsize, int(pow2_scale)
    rows, cols, x_stride = x.rows, x.shape[-1], x.row_stride
    residual_stride = 0 if residual is None else residual.row_stride
    starts = misaligned(x, weight, bias, residual)
    aligned16 = vector_bytes(starts, cols * size, x_stride * size, residual_stride * size) == 16
    groups, row_tiles = groups_of(cols), groups_of(rows)
    scale_strides = (1, rows) if scale_layout == "column" else (groups, 1)
    vec = WIDTH[t] if aligned16 else 1
    vectors = -(-cols // vec)
    sizes = rows, cols, x_stride, residual_stride
    parameter = weight or bias or x
    w = DTYPE_TOKEN[parameter.dtype]
    statistics = ("made_rstd", at("made_mean")) if rstd is None else ("rstd", "mean")
    codes = at("q"), at("scale")
    if layout in ("row", "none") and aligned16 and vectors <= _ROW_THREADS * _ROW_CHUNKS and rows < 1 << 31:
        threads = max(group_threads(-(-vectors // _ROW_CHUNKS), _ROW_THREADS), GROUP // vec)
        block = block_of(threads)
        launch = _ROW.bind((t, w, _ROW_CHUNKS, centred), device, -(-rows // (block // threads)), block)
        numbers = *sizes, threads, *scale_strides, pow2, rstd is not None, eps, offset
        tensors = "x", "residual", "weight", "bias", *codes, *statistics, at("y"), at("sum")
        return Steps(Step(launch, *tensors, *numbers))
    known = rstd is not None or residual is not None  # before the tiles begin
    matrix, source = ring.Matrix(t, device, rows, cols, x_stride), "x" if residual is None else "sum"
    options = {"weight_fp32": w != t, "pow2": pow2, "offset": offset}
    ringed = known and aligned16 and not (centred or keep) and ring.serves(matrix)
    if ringed and layout in ("transposed", "both"):
        after, both = residual is not None, layout == "both"
        matrix = matrix._replace(stride=cols) if after else matrix  # the sum is dense
        tensors = source, "weight", statistics[0], *codes, "scale_t"
        tiles = ring.ring_step(matrix, scale_strides, tensors, by_rows=both, after=after, **options)
        stats = [_stats((t, vec, False), device, rows, sizes, at("sum"), statistics, 0, eps)] if after else []
        return Steps(*stats, tiles)
    alone = layout == "both" and aligned16 and single_read and not (known or centred or keep)
    if alone and (blocks := ring.single_read_blocks(matrix)):
        tensors = "x", "weight", "made_rstd", "q", "scale", "scale_t"
        return ring.single_read_steps(matrix, blocks, scale_strides, tensors, eps=eps, two_passes=two_passes, **options)
    stats, ticket, distance, makers, stats_rows = [], 0, row_tiles, 0, 0
    if rstd is None:
        if aligned16 and residual is None and rows * cols * size >= _TOGETHER_BYTES:
            stats_rows = _stats_rows(cols * size, GROUP // WIDTH[t] * 16 // 32)
            makers = GROUP // stats_rows
            distance = -(-_STATS_DISTANCE_PER_SM * device_info(device).sm_count // (groups + makers))
            if 2 * distance > row_tiles:
                distance, makers = row_tiles, 0
        ticket = "ticket" if makers and device < 0 else 0  # the emulator starts blocks in any order
        first, variant = min(rows, distance * GROUP), (t, vec, centred or not aligned16)
        stats = [_stats(variant, device, first, sizes, at("sum"), statistics, ticket, eps)]
    variant = (t, True, layout != "transposed", True, False)
    if centred or not aligned16:
        variant = (t, aligned16, True, True, True)
    blocks = groups * row_tiles + makers * (row_tiles - distance)
    launch = _TILE.bind(variant, device, blocks, GROUP // WIDTH[t] * 16, overlap=rstd is None)
    tensors = source, "weight", "bias", *statistics, *codes, at("q_t"), at("scale_t"), at("y"), ticket
    numbers = (
        rows, cols, x_stride if residual is None else cols, *scale_strides, groups, w != t, residual is None, pow2,
        distance, makers, stats_rows, eps, offset,
    )  # fmt: skip
    scratch = {"ticket": Memory((1,), torch.int32)} if ticket else {}
    return Steps(*stats, Step(launch, *tensors, *numbers), scratch=scratch)


def _stats(
    variant: tuple[str, int, bool], device: int, first: int, sizes: tuple[int, int, int, int], total: str | int,
    statistics: tuple[str | int, ...], ticket: str | int, eps: float,
) -> Step:  # fmt: skip
    """Return the launch for statistics of the `first` rows; `sizes`: rows, columns, row strides of x and residual."""
    threads = group_threads(-(-sizes[1] // (4 * variant[1])), _STATS_THREADS)
    block = block_of(threads)
    launch = _STATS.bind(variant, device, -(-first // (block // threads)), block)
    return Step(launch, "x", "residual", total, *statistics, ticket, first, *sizes, threads, eps)


def _stats_rows(row_bytes: int, warps: int) -> int:
    """Return how many rows a block makes statistics of: a power of two, at least one per warp, at most 128."""
    rows = 2 * warps if 2 * warps * row_bytes <= _MAX_STATS_BYTES else warps
    while rows < GROUP and 2 * rows * row_bytes <= _STATS_BYTES:
        rows *= 2
    return rows


def plan_smooth(
    x: Meta, smooth: Meta, weight: Meta | None, bias: Meta | None, residual: Meta | None, eps: float, offset: float,
    pow2_scale: bool, keep: bool, calibrate: bool, centred: bool, device: int,
) -> Steps:  # fmt: skip
    made = smooth_outputs(x, residual, keep, calibrate, centred)
    names = [name if name in made else 0 for name in ("q", "scale", "made_rstd", "made_mean", "y", "sum", "amax")]
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
