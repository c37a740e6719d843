"""Launch planning of ``quantize_fp8`` and ``quantize_int8``: shapes, checks, and metadata to launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import quantize_fp8_kernels as kernels
from rtkernels.ops.quant.quantize_fp8_generic_plan import generic_static, generic_steps, generic_tensor
from rtkernels.ops.quant.quantize_fp8_kernels import GROUP, WIDTH
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES, SCALE_LAYOUTS, Fp8Layout, check_option, groups_of
from rtkernels.runtime.checks import check_dimensions, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import build_together
from rtkernels.runtime.layout import (
    DTYPE_TOKEN,
    RowSlices,
    group_threads,
    row_blocks,
    row_count,
    row_slices,
    vector_bytes,
)
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Step, Steps

GRANULARITIES = ("tensor", "row", "group", "group_t", "block")
BOTH_GRANULARITIES = ("group", "block")  # that have a version with transposed codes and the others

_ROW_THREADS = 512
_ROW_CHUNKS = 4
_GROUP_THREADS = 256
_SECTOR_SCALES = 8  # of 4 bytes each: what L2 and memory move at least
_GRID_LIMIT_Y = 65535  # blocks in y or z
_SMALL_BYTES = 256 << 10  # up to here, a single launch in which every block reads all of x
_SMALL_THREADS = 1024
_AMAX_BLOCKS_PER_SM = 4  # resident together: the pass ends everywhere at about the same time


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def scale_shape(shape: Sequence[int], granularity: str, layout: str) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of `shape` (of the unquantised one, for "group_t")."""
    leading, rows, cols = tuple(shape[:-1]), row_count(shape), shape[-1]
    return {
        "tensor": (),
        "row": leading,
        "group": (groups_of(cols), rows) if layout == "column" else (*leading, groups_of(cols)),
        "group_t": (groups_of(rows), cols),
        "block": (groups_of(rows), groups_of(cols)),
    }[granularity]


def empty_scale(pow2: bool) -> float:
    """Return the scale of a set without a finite value other than 0, as the kernels compute it."""
    return 2.0**-99 if pow2 else 1e-30


def check_options(granularity: str, layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together."""
    if granularity not in GRANULARITIES:
        check_option("granularity", granularity, (*GRANULARITIES, "channel"))
        raise ArgumentError("granularity 'channel' has operators of its own; call quantize_fp8 or dequantize_fp8")
    check_option("scale_layout", layout, SCALE_LAYOUTS)
    if layout == "column" and granularity != "group":
        raise ArgumentError(f"scale_layout 'column' goes with granularity 'group' only, not with {granularity!r}")


def check_quantize(
    x: Meta | Tensor, dtype: torch.dtype, granularity: str = "tensor", scale_layout: str = "row"
) -> None:
    """Raise an ArgumentError unless x can be quantised with these options."""
    check_options(granularity, scale_layout)
    token("x", x.dtype)
    token("the result", dtype, FP8_DTYPES)
    check_dimensions("x", x.shape)


def check_both(x: Meta, granularity: str, dtype: torch.dtype, scale_layout: str) -> None:
    """Raise an ArgumentError unless x can be quantised with transposed codes as well."""
    check_quantize(x, dtype, granularity, scale_layout)
    if granularity not in BOTH_GRANULARITIES:
        raise ArgumentError(
            f"layout 'both' (with_transposed) goes with granularity {' and '.join(map(repr, BOTH_GRANULARITIES))}, "
            f"not {granularity!r}"
        )


def check_static_scale(scale: Meta) -> None:
    """Raise an ArgumentError unless a given scale is one fp32 number."""
    token("scale", scale.dtype, (torch.float32,))
    if scale.numel() != 1:
        raise ArgumentError(
            f"scale has shape {tuple(scale.shape)}; expected one element, the scale of the whole tensor"
        )


def check_static(x: Meta, scale: Meta, dtype: torch.dtype) -> None:
    check_quantize(x, dtype)
    check_static_scale(scale)


def q_shape(shape: Sequence[int], granularity: str) -> tuple[int, ...]:
    """Return the shape of the codes of a tensor of `shape`."""
    return (shape[-1], row_count(shape)) if granularity == "group_t" else tuple(shape)


def outputs_quantize(x, granularity, dtype, scale_layout):
    check_options(granularity, scale_layout)
    scale = Memory(scale_shape(x.shape, granularity, scale_layout), torch.float32)
    return Memory(q_shape(x.shape, granularity), dtype), scale


def outputs_both(x, granularity, dtype, scale_layout):
    q, scale = outputs_quantize(x, granularity, dtype, scale_layout)
    q_t, scale_t = Fp8Layout(x.shape, "transposed", dtype=dtype).outputs()[2:]
    return q, scale, q_t, scale_t if granularity == "group" else None


class Matrix:
    """A tensor as rows of columns, and the widest access its addresses allow."""

    def __init__(self, meta: Meta, width: int, *, flat: bool) -> None:
        self.device, self.rows, self.cols, self.stride = meta.device, meta.rows, meta.shape[-1], meta.row_stride
        if flat and self.stride == self.cols:
            self.rows, self.cols, self.stride = 1, self.rows * self.cols, self.rows * self.cols
        size = meta.dtype.itemsize
        bytes_ = vector_bytes(meta.misaligned, self.cols * size, self.stride * size, limit=width * size)
        self.vec = width if bytes_ == width * size else 1

    def row_slices(self, in_flight: int, threads: int = 256) -> RowSlices:
        """Cut the matrix for a kernel with `in_flight` vectors per thread and slice, or eight single elements."""
        return row_slices(self.rows, self.cols, 8 if self.vec == 1 else self.vec * in_flight, threads)


def plan_quantize(
    x: Meta, granularity: str, dtype: torch.dtype, pow2_scale: bool, scale_layout: str, device: int
) -> Steps:
    t, f, pow2 = x.token, DTYPE_TOKEN[dtype], int(pow2_scale)
    m = Matrix(x, WIDTH[t], flat=granularity == "tensor")
    if granularity != "tensor":
        if m.vec == 1:
            return Steps(*generic_steps(m, t, f, pow2, granularity, scale_layout))
        return Steps(_BY_GRANULARITY[granularity](m, t, f, pow2, scale_layout))
    return generic_tensor(m, t, f, pow2) if m.vec == 1 else _tensor(m, t, f, pow2)


def plan_int8(x: Meta, granularity: str) -> Steps | None:
    """Return the launches for int8 codes with a scale per row or tensor; None without 16-byte accesses."""
    t = x.token
    m = Matrix(x, WIDTH[t], flat=granularity == "tensor")
    if m.vec == 1:
        return None
    return _tensor(m, t, "int8", 0) if granularity == "tensor" else Steps(_row(m, t, "int8", 0, "row"))


def _tensor(m: Matrix, t: str, f: str, pow2: int) -> Steps:
    device = m.device
    if m.rows == 1 and m.cols // m.vec * 16 <= _SMALL_BYTES:
        grid = -(-m.cols // (m.vec * _SMALL_THREADS))
        launch = kernels.SMALL.bind((t, f), device, grid, _SMALL_THREADS)
        return Steps(Step(launch, "x", "q", "scale", m.cols // m.vec, pow2))
    # A pass for the largest magnitude, then one that quantises.
    reading, writing = m.row_slices(8), m.row_slices(4)
    blocks = min(reading.grid, _AMAX_BLOCKS_PER_SM * device_info(device).sm_count)
    build_together(device, (kernels.AMAX, (t, m.vec)), (kernels.TENSOR, (t, f, m.vec)))
    sizes = m.rows, m.cols, m.stride
    amax = Step(kernels.AMAX.bind((t, m.vec), device, blocks, reading.block), "x", "partial", *sizes, *reading[:2])
    launch = kernels.TENSOR.bind((t, f, m.vec), device, writing.grid, writing.block, overlap=True)
    codes = Step(launch, "x", "scale", "partial", "q", *sizes, *writing[:2], blocks, pow2)
    return Steps(amax, codes, scratch={"partial": Memory((blocks,), torch.float32)})


def plan_both(x: Meta, granularity: str, dtype: torch.dtype, pow2_scale: bool, scale_layout: str, device: int) -> Steps:
    t, f, pow2 = x.token, DTYPE_TOKEN[dtype], int(pow2_scale)
    m = Matrix(x, WIDTH[t], flat=False)
    if m.vec == 1:
        return Steps(*generic_steps(m, t, f, pow2, granularity, scale_layout, both=True))
    tiles, strips, sizes = groups_of(m.cols), groups_of(m.rows), (m.rows, m.cols, m.stride)
    if granularity == "block":
        launch = kernels.BLOCK_BOTH.bind((t, f), device, tiles * strips, tile_threads(t))
        return Steps(Step(launch, "x", "q", "scale", "q_t", *sizes, tiles, pow2))
    strides = (1, m.rows) if scale_layout == "column" else (tiles, 1)
    tiles_per_block = 1 if t == "fp32" else 2
    grid = -(-tiles // tiles_per_block), min(strips, _GRID_LIMIT_Y), -(-strips // _GRID_LIMIT_Y)
    launch = kernels.GROUP_BOTH.bind((t, f), device, grid, tiles_per_block * tile_threads(t))
    return Steps(Step(launch, "x", "q", "scale", "q_t", "scale_t", *sizes, *strides, pow2))


def plan_static(x: Meta, dtype: torch.dtype, device: int) -> Steps:
    t, f = x.token, DTYPE_TOKEN[dtype]
    m = Matrix(x, WIDTH[t], flat=True)
    if m.vec == 1:
        return Steps(generic_static(m, t, f))
    cut = m.row_slices(4)
    launch = kernels.TENSOR.bind((t, f, m.vec), device, cut.grid, cut.block)
    return Steps(Step(launch, "x", "scale", 0, "q", m.rows, m.cols, m.stride, *cut[:2], 0, 0))


def _row(m: Matrix, t: str, f: str, pow2: int, layout: str) -> Step:
    vectors = m.cols // m.vec
    if vectors <= _ROW_THREADS * _ROW_CHUNKS:
        kernel, threads = kernels.ROW, group_threads(-(-vectors // _ROW_CHUNKS), _ROW_THREADS)
    else:
        kernel, threads = kernels.ROW_LONG, group_threads(vectors, 1024)
    grid, block = row_blocks(m.rows, threads)
    launch = kernel.bind((t, f, m.vec), m.device, grid, block)
    return Step(launch, "x", "q", "scale", m.rows, m.cols, m.stride, threads, pow2)


def _group(m: Matrix, t: str, f: str, pow2: int, layout: str) -> Step:
    rows, cols, stride = m.rows, m.cols, m.stride
    groups = groups_of(cols)
    strides = (1, rows) if layout == "column" else (groups, 1)
    if layout == "row" and stride == cols and cols % GROUP == 0 and rows * groups % _SECTOR_SCALES == 0:
        # No group ends early and none is followed by a gap: rows of any length will do.
        rows, cols, groups = rows * groups // _SECTOR_SCALES, _SECTOR_SCALES * GROUP, _SECTOR_SCALES
        stride, strides = cols, (groups, 1)
    sets, across = 8, 32 // m.vec
    tiles = -(-groups // _SECTOR_SCALES)
    grid = tiles * -(-rows // (_GROUP_THREADS // 32 * sets // across))
    launch = kernels.GROUPED.bind((t, f, m.vec), m.device, grid, _GROUP_THREADS)
    return Step(launch, "x", "q", "scale", rows, cols, stride, *strides, tiles, pow2)


def _block(m: Matrix, t: str, f: str, pow2: int, layout: str) -> Step:
    tiles = groups_of(m.cols)
    threads = GROUP * GROUP // (8 * m.vec)
    launch = kernels.BLOCK.bind((t, f, m.vec), m.device, tiles * groups_of(m.rows), threads)
    return Step(launch, "x", "q", "scale", m.rows, m.cols, m.stride, tiles, pow2)


def tile_threads(t: str) -> int:
    """Return the threads of a block that holds a tile of 128 x 128 (quant/tile.cuh)."""
    return GROUP // WIDTH[t] * 16


def _group_t(m: Matrix, t: str, f: str, pow2: int, layout: str) -> Step:
    tiles = groups_of(m.cols)
    launch = kernels.GROUPED_T.bind((t, f), m.device, tiles * groups_of(m.rows), tile_threads(t))
    return Step(launch, "x", "q", "scale", m.rows, m.cols, m.stride, tiles, pow2)


_BY_GRANULARITY: dict[str, Callable[..., Step]] = {"row": _row, "group": _group, "block": _block, "group_t": _group_t}
