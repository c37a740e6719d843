"""How the quantised normalisations are launched: kernel records, and from tensor metadata to launches."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ResidencyError
from rtkernels.ops.norm import norm_fp8_ring_plan as ring
from rtkernels.ops.norm.norm_fp8_shapes import (
    GROUP,
    Metadata,
    check,
    check_inputs,
    groups_of,
    outputs_of,
    smooth_outputs_of,
    statistics_of,
)
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import allocator, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import address, block_of, group_threads, row_count, row_stride, token, vector_bytes

_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_ROW_THREADS, _ROW_CHUNKS = 512, 4
_STATS_THREADS = 512
_SMOOTH_VEC = 4  # elements per access

# One launch makes statistics and tiles together where x has at least so many bytes: less stays in L2 anyway.
_TOGETHER_BYTES = 24 << 20
# Tiles and makers of statistics between the making of a row's statistics and their use, per multiprocessor.
_AHEAD_PER_SM = 3
# Of x that a block makes statistics of: two rows a warp, but not more than the second; then up to the first.
_STATS_BYTES, _MOST_STATS_BYTES = 64 << 10, 128 << 10

_STATISTICS = "rstd:ptr mean:ptr"
_ROW = Kernel(
    "norm/norm_fp8.cu",
    "norm_fp8_row",
    template="T W CHUNKS CENTRED",
    args=f"x:ptr residual:ptr weight:ptr bias:ptr q:ptr scale:ptr {_STATISTICS} y:ptr sum:ptr rows:i64 cols:i64 "
    "x_stride:i64 residual_stride:i64 threads_per_row:i64 scale_row:i64 scale_group:i64 pow2:i64 given:i64 eps:f64 "
    "offset:f64",
    variants=[(t, w, _ROW_CHUNKS, centred) for t, w in _TYPES for centred in (False, True)],
    max_registers=128,
)
_STATS = Kernel(
    "norm/norm_fp8.cu",
    "norm_fp8_stats",
    template="T VEC CENTRED",
    args=f"x:ptr residual:ptr sum:ptr {_STATISTICS} ticket:ptr rows:i64 all_rows:i64 cols:i64 x_stride:i64 "
    "residual_stride:i64 threads_per_row:i64 eps:f64",
    variants=[(t, *rest) for t, v in _WIDTH.items() for rest in ((1, True), (v, False), (v, True))],
    max_registers=64,
)
_TILE = Kernel(
    "norm/norm_fp8_tile.cu",
    "norm_fp8_tile",
    template="T WIDE ROWS COLUMNS CENTRED",
    args=f"x:ptr weight:ptr bias:ptr {_STATISTICS} q:ptr scale:ptr q_t:ptr scale_t:ptr y:ptr ticket:ptr rows:i64 "
    "cols:i64 x_stride:i64 scale_row:i64 scale_group:i64 column_tiles:i64 weight_wide:i64 early:i64 pow2:i64 ahead:i64 "
    "stats_blocks:i64 stats_rows:i64 eps:f64 offset:f64",
    variants=[
        (t, *rest)
        for t in _WIDTH
        for rest in (
            (True, True, True, False),
            (True, False, True, False),
            (True, True, True, True),
            (False, True, True, True),
        )
    ],
    max_registers=128,
)
_SMOOTH = Kernel(
    "norm/norm_fp8_smooth.cu",
    "norm_fp8_smooth",
    template="T VEC",
    args=f"x:ptr residual:ptr weight:ptr bias:ptr smooth:ptr q:ptr scale:ptr {_STATISTICS} y:ptr sum:ptr most:ptr "
    "rows:i64 cols:i64 x_stride:i64 residual_stride:i64 wide:i64 pow2:i64 gather:i64 eps:f64 offset:f64",
    variants=[(t, v) for t in _WIDTH for v in (1, _SMOOTH_VEC)],
    max_registers=100,
)
KERNELS = (_ROW, _STATS, _TILE, ring.RING, ring.ONCE, _SMOOTH)


# ---- plans ----------------------------------------------------------------------------------------------------------

_SLOTS = ("q", "scale", "q_t", "scale_t", "rstd", "mean", "y", "sum", "amax")


class _Outputs:
    """Allocates the results of a call."""

    def __init__(self, device: int, wanted: list[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        self._allocate = allocator(device)
        self._wanted = [(_SLOTS.index(name), (s, dense_strides(s), d)) for name, s, d in wanted]

    def make(self) -> tuple[list[Tensor], list[int]]:
        """Return the tensors in order, and the address of each slot (0 without one)."""
        allocate, results, at = self._allocate, [], [0] * len(_SLOTS)
        for slot, layout in self._wanted:
            made = allocate(*layout)
            results.append(made)
            at[slot] = made.data_ptr()
        return results, at


class _Plan:
    """Allocations and the one or two launches of a call."""

    def __init__(
        self,
        x: Metadata,
        weight: Metadata | None,
        bias: Metadata | None,
        residual: Metadata | None,
        rstd: Metadata | None,
        layout: str,
        pow2: bool,
        scale_layout: str,
        keep: bool,
        centred: bool,
        align: int,
    ) -> None:
        dtype, shape, stride, device = x
        t, size = token("x", dtype), dtype.itemsize
        rows, cols = row_count(shape), shape[-1]
        x_stride = row_stride(shape, stride)
        residual_stride = 0 if residual is None else row_stride(*residual[1:3])
        computed = statistics_of(centred) if rstd is None else ()
        wanted = outputs_of(shape, dtype, layout, scale_layout, computed, keep, residual is not None)
        self._make = _Outputs(device, wanted).make
        wide = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) == 16
        groups, row_tiles = groups_of(cols), groups_of(rows)
        scale_strides = (1, rows) if scale_layout == "column" else (groups, 1)
        vec = _WIDTH[t] if wide else 1
        vectors = -(-cols // vec)
        dims = (rows, cols, x_stride, residual_stride)
        parameter = weight or bias
        w = t if parameter is None else token("weight", parameter[0])
        self._row = self._stats = self._ring = self._once = self._two_pass = None
        if layout in ("row", "none") and wide and vectors <= _ROW_THREADS * _ROW_CHUNKS and rows < 1 << 31:
            threads = max(group_threads(-(-vectors // _ROW_CHUNKS), _ROW_THREADS), GROUP // vec)
            block = block_of(threads)
            self._row = _ROW.bind((t, w, _ROW_CHUNKS, centred), device, -(-rows // (block // threads)), block)
            self._args = (rows, cols, x_stride, residual_stride, threads, *scale_strides, pow2, rstd is not None)
            return
        known = rstd is not None or residual is not None  # before the tiles begin
        matrix = ring.Matrix(t, device, rows, cols, x_stride)
        ringed = known and wide and not (centred or keep) and ring.serves(matrix)
        if ringed and layout in ("transposed", "both"):
            source = matrix if residual is None else matrix._replace(stride=cols)  # the sum is dense
            both, after = layout == "both", residual is not None
            self._ring = ring.RingLaunch(
                source, scale_strides, by_rows=both, weight_wide=w != t, pow2=pow2, after=after
            )
            if residual is not None:
                self._bind_stats((t, vec, False), device, rows, dims)
            return
        alone = layout == "both" and wide and not (known or centred or keep)
        if alone and (blocks := ring.blocks_once(matrix)):
            self._once = ring.OnceLaunch(matrix, blocks, scale_strides, weight_wide=w != t, pow2=pow2)
            self._device = device
            self._instead = lambda: _Plan(
                x, weight, bias, residual, rstd, layout, pow2, scale_layout, keep, centred, align
            )
            return
        self._ticket, ahead, makers, stats_rows = None, row_tiles, 0, 0
        if rstd is None:
            together = wide and residual is None and rows * cols * size >= _TOGETHER_BYTES
            if together:
                stats_rows = _stats_rows(cols * size, GROUP // _WIDTH[t] * 16 // 32)
                makers = GROUP // stats_rows
                ahead = -(-_AHEAD_PER_SM * device_info(device).sm_count // (groups + makers))
                if 2 * ahead > row_tiles:
                    ahead, makers = row_tiles, 0
            self._bind_stats((t, vec, centred or not wide), device, min(rows, ahead * GROUP), dims)
            if makers and device < 0:  # the emulator starts blocks in any order
                self._ticket = torch.empty(1, dtype=torch.int32, device="cpu")
        if not wide:
            variant = (t, False, True, True, True)
        elif centred:
            variant = (t, True, True, True, True)
        else:
            variant = (t, True, layout != "transposed", True, False)
        blocks = groups * row_tiles + makers * (row_tiles - ahead)
        self._tile = _TILE.bind(variant, device, blocks, GROUP // _WIDTH[t] * 16, overlap=rstd is None)
        if residual is not None:
            x_stride = cols  # the sum is read instead
        self._args = (
            rows, cols, x_stride, *scale_strides, groups, w != t, residual is None, pow2, ahead, makers, stats_rows,
        )  # fmt: skip

    def _bind_stats(
        self, variant: tuple[str, int, bool], device: int, first: int, dims: tuple[int, int, int, int]
    ) -> None:
        """Bind the statistics of the `first` rows; `dims`: rows, columns, row strides of x and the residual."""
        threads = group_threads(-(-dims[1] // (4 * variant[1])), _STATS_THREADS)
        block = block_of(threads)
        self._stats = _STATS.bind(variant, device, -(-first // (block // threads)), block)
        self._stats_args = (first, *dims, threads)

    def run(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        rstd: Tensor | None,
        mean: Tensor | None,
        eps: float,
        offset: float,
    ) -> list[Tensor]:
        if self._two_pass is not None:
            return self._two_pass.run(x, weight, bias, residual, rstd, mean, eps, offset)
        results, (q, scale, q_t, scale_t, made_rstd, made_mean, y, total, _) = self._make()
        inputs = (x.data_ptr(), address(residual))
        statistics = (made_rstd or address(rstd), made_mean or address(mean))
        if self._row is not None:
            self._row(
                *inputs, address(weight), address(bias), q, scale, *statistics, y, total, *self._args, eps, offset
            )
            return results
        if self._once is not None:
            try:
                self._once(inputs[0], address(weight), made_rstd, q, scale, q_t, scale_t, eps, offset)
            except ResidencyError:
                ring.refuse_once(self._device)
                self._two_pass = self._instead()
                return self._two_pass.run(x, weight, bias, residual, rstd, mean, eps, offset)
            return results
        ticket = address(self._ticket) if self._ring is None else 0
        if self._stats is not None:
            self._stats(*inputs, total, *statistics, ticket, *self._stats_args, eps)
        if self._ring is not None:
            self._ring(total or inputs[0], address(weight), statistics[0], q, scale, q_t, scale_t, offset)
            return results
        self._tile(
            total or inputs[0], address(weight), address(bias), *statistics, q, scale, q_t, scale_t, y, ticket,
            *self._args, eps, offset,
        )  # fmt: skip
        return results


def _stats_rows(row_bytes: int, warps: int) -> int:
    """Return how many rows a block makes statistics of: a power of two, at least one per warp, at most 128."""
    rows = 2 * warps if 2 * warps * row_bytes <= _MOST_STATS_BYTES else warps
    while rows < GROUP and 2 * rows * row_bytes <= _STATS_BYTES:
        rows *= 2
    return rows


def _is_dense(t: Metadata | None) -> bool:
    """Return True if a tensor that is not empty is contiguous as torch sees it: strides of size 1 do not count."""
    step = 1
    for size, stride in reversed(list(zip(*t[1:3], strict=True)) if t else ()):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _ready(x: Metadata, residual: Metadata | None, *dense: Metadata | None) -> bool:
    """Return True if nothing has to be copied before a launch."""
    rowed = row_stride(*x[1:3]) is not None and (residual is None or row_stride(*residual[1:3]) is not None)
    return rowed and all(map(_is_dense, dense))


def _plan(x, weight, bias, residual, rstd, mean, layout, pow2, scale_layout, keep, centred, align: int):
    """Return what to run: a plan; None if an input must be copied first; False if there is nothing to launch."""
    check(x, weight, bias, residual, rstd, mean, layout, scale_layout, keep, centred)
    if 0 in x[1]:
        return False
    if not _ready(x, residual, weight, bias, rstd, mean):
        return None
    return _Plan(x, weight, bias, residual, rstd, layout, pow2, scale_layout, keep, centred, align)


PLANS = Plans(_plan)


class _SmoothPlan:
    """Allocations and the launch of a call with a smoothing vector."""

    def __init__(self, x, weight, bias, residual, pow2, keep, calibrate, centred, align: int) -> None:
        dtype, shape, stride, device = x
        t, size = token("x", dtype), dtype.itemsize
        rows, cols = row_count(shape), shape[-1]
        x_stride = row_stride(shape, stride)
        residual_stride = 0 if residual is None else row_stride(*residual[1:3])
        self._make = _Outputs(
            device, smooth_outputs_of(shape, dtype, keep, residual is not None, calibrate, centred)
        ).make
        wide = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) == 16  # fp32 vectors too
        vec = _SMOOTH_VEC if wide else 1
        info = device_info(device)
        gather = calibrate and 4 * cols + 1024 <= info.shared_per_block
        threads = min(-(-cols // (32 * vec)) * 32, 256)
        grid = min(rows, (4 if calibrate else 64) * info.sm_count)
        self._launch = _SMOOTH.bind((t, vec), device, grid, threads, 4 * cols if gather else 0)
        parameter = weight or bias
        weight_wide = parameter is not None and parameter[0] != dtype
        self._args = (rows, cols, x_stride, residual_stride, weight_wide, pow2, gather)
        self._calibrate = calibrate

    def run(self, x, smooth, weight, bias, residual, eps: float, offset: float) -> list[Tensor]:
        results, (q, scale, _, _, rstd, mean, y, total, amax) = self._make()
        if self._calibrate:
            results[-1].zero_()
        self._launch(
            x.data_ptr(), address(residual), address(weight), address(bias), smooth.data_ptr(), q, scale, rstd, mean, y,
            total, amax, *self._args, eps, offset,
        )  # fmt: skip
        return results


def _plan_smooth(x, smooth, weight, bias, residual, pow2, keep, calibrate, centred, align: int):
    check_inputs(x, weight, bias, residual, smooth=smooth)
    if 0 in x[1]:
        return False
    if not _ready(x, residual, smooth, weight, bias):
        return None
    return _SmoothPlan(x, weight, bias, residual, pow2, keep, calibrate, centred, align)


SMOOTH_PLANS = Plans(_plan_smooth)
