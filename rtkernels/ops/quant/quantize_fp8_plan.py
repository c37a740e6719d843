"""Launch planning of ``quantize_fp8``: shapes, checks, and metadata to launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant.quantize_fp8_generic_plan import both_launch, codes_launch, static_launch, tensor_launches
from rtkernels.ops.quant.quantize_fp8_kernels import (
    AMAX,
    BLOCK,
    BLOCK_BOTH,
    GROUP,
    GROUP_BOTH,
    GROUPED,
    GROUPED_T,
    ROW,
    ROW_LONG,
    SMALL,
    TENSOR,
    WIDTH,
)
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import build_together
from rtkernels.runtime.launch.memory import allocator, dense_memory, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    Runs,
    block_of,
    check_same,
    group_threads,
    metadata,
    row_count,
    row_stride,
    runs,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.plan import DensePlan, Plan

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES = ("tensor", "row", "group", "group_t", "block")
BOTH_GRANULARITIES = ("group", "block")  # that have a version with transposed codes beside the others
SCALE_LAYOUTS = ("row", "column")

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)
Output = tuple[Sequence[int], torch.dtype]  # shape and dtype of a dense result

_ROW_THREADS, _ROW_CHUNKS = 512, 4
_GROUP_THREADS = 256
_SECTOR_SCALES = 8  # of 4 bytes each: what L2 and memory move at least
_GRID_LIMIT_Y = 65535  # blocks in y or z
_SMALL_BYTES, _SMALL_THREADS = 256 << 10, 1024  # one launch, in which every block reads all of x
_AMAX_BLOCKS_PER_SM = 4  # resident together: the pass ends everywhere at about the same time


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def groups_of(size: int) -> int:
    """Return how many groups of 128 cover `size` elements."""
    return -(-size // GROUP)


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


def _check_option(name: str, value: Any, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ArgumentError(f"{name} is {value!r}; expected one of {', '.join(map(repr, accepted))}")


def check_options(granularity: str, layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together."""
    if granularity not in GRANULARITIES:
        _check_option("granularity", granularity, (*GRANULARITIES, "channel"))
        raise ArgumentError("granularity 'channel' has operators of its own; call quantize_fp8 or dequantize_fp8")
    _check_option("scale_layout", layout, SCALE_LAYOUTS)
    if layout == "column" and granularity != "group":
        raise ArgumentError(f"scale_layout 'column' goes with granularity 'group' only, not with {granularity!r}")


def check_quantize(x: Metadata, granularity: str, dtype: torch.dtype, layout: str) -> None:
    """Raise an ArgumentError unless x can be quantised as asked."""
    check_options(granularity, layout)
    token("x", x[0])
    token("the result", dtype, FP8_DTYPES)
    if not x[1]:
        raise ArgumentError("x has no dimensions; expected at least one")


def check_both(x: Metadata, granularity: str, dtype: torch.dtype, layout: str) -> None:
    """Raise an ArgumentError unless x can be quantised with the transposed codes beside the others."""
    check_quantize(x, granularity, dtype, layout)
    if granularity not in BOTH_GRANULARITIES:
        raise ArgumentError(
            f"layout 'both' (with_transposed) goes with granularity {' and '.join(map(repr, BOTH_GRANULARITIES))}, "
            f"not {granularity!r}"
        )


def check_static_scale(scale: Metadata, device: int) -> None:
    """Raise an ArgumentError unless a given scale is one fp32 number on x's device."""
    dtype, shape, _, scale_device = scale
    token("scale", dtype, (torch.float32,))
    if row_count((*shape, 1)) != 1:
        raise ArgumentError(f"scale has shape {tuple(shape)}; expected one element, the scale of the whole tensor")
    check_same("scale", scale_device, device, "device index")


# ---- plans ----------------------------------------------------------------------------------------------------------


class Matrix:
    """A tensor as rows of columns, and the widest access its addresses allow."""

    def __init__(self, meta: Metadata, align: int, width: int, *, flat: bool) -> None:
        dtype, shape, stride, self.device = meta
        self.rows, self.cols, self.stride = row_count(shape), shape[-1], row_stride(shape, stride)
        if flat and self.stride == self.cols:
            self.rows, self.cols, self.stride = 1, self.rows * self.cols, self.rows * self.cols
        size = dtype.itemsize
        bytes_ = vector_bytes(align, self.cols * size, self.stride * size, most=width * size)
        self.vec = width if bytes_ == width * size else 1

    def runs(self, in_flight: int, threads: int = 256) -> Runs:
        """Cut the matrix for a kernel with `in_flight` wide accesses per thread and run, or eight narrow ones."""
        return runs(self.rows, self.cols, 8 if self.vec == 1 else self.vec * in_flight, threads)


class _QuantizePlan(Plan):
    """One launch that writes codes and scales."""

    __slots__ = ("_allocate", "_launch", "_q", "_scale")

    def __init__(self, launch: Launch, device: int, q: Output, scale: Output) -> None:
        super().__init__()
        self._launch, self._allocate, self._q, self._scale = launch, allocator(device), _layout(q), _layout(scale)

    def run(self, x: int) -> tuple[Tensor, Tensor]:
        q, scale = self._allocate(*self._q), self._allocate(*self._scale)
        self._launch(x, q.data_ptr(), scale.data_ptr())
        return q, scale


class _BothPlan(Plan):
    """The same with transposed codes and their scales, which "block" does not have."""

    __slots__ = ("_allocate", "_launch", "_layouts", "_written")

    def __init__(self, launch: Launch, device: int, outputs: Sequence[Output]) -> None:
        super().__init__()
        self._launch, self._allocate, self._written = launch, allocator(device), len(outputs)
        self._layouts = [_layout(output) for output in (*outputs, ((0,), torch.float32))[:4]]

    def run(self, x: int) -> tuple[Tensor, ...]:
        outputs = [self._allocate(*layout) for layout in self._layouts]
        self._launch(x, *[output.data_ptr() for output in outputs[: self._written]])
        return tuple(outputs)


class _DynamicPlan(Plan):
    """One scale for the tensor: a pass for the largest magnitude, then one that quantises."""

    __slots__ = ("_allocate", "_amax", "_layouts", "_quantize")

    def __init__(self, m: Matrix, t: str, f: str, pow2: bool, q: Output) -> None:
        super().__init__()
        self._allocate = allocator(m.device)
        if m.vec == 1:
            self._amax, self._quantize, blocks = tensor_launches(m, t, f, pow2)
        else:
            blocks = self._bind(m, t, f, pow2)
        self._layouts = _layout(q), _layout(((), torch.float32)), _layout(((blocks,), torch.float32))

    def _bind(self, m: Matrix, t: str, f: str, pow2: bool) -> int:
        """Bind both launches; return how many blocks the first one has."""
        reading, writing = m.runs(8), m.runs(4)
        blocks = min(reading.grid, _AMAX_BLOCKS_PER_SM * device_info(m.device).sm_count)
        build_together(m.device, (AMAX, (t, m.vec)), (TENSOR, (t, f, m.vec)))
        dims = m.rows, m.cols, m.stride
        self._amax = AMAX.bind((t, m.vec), m.device, blocks, reading.block, ending=(*dims, *reading[:2]))
        self._quantize = TENSOR.bind(
            (t, f, m.vec), m.device, writing.grid, writing.block, overlap=True,
            ending=(*dims, *writing[:2], blocks, pow2),
        )  # fmt: skip
        return blocks

    def run(self, x: int) -> tuple[Tensor, Tensor]:
        q, scale, partial = [self._allocate(*layout) for layout in self._layouts]
        self._amax(x, partial.data_ptr())
        self._quantize(x, scale.data_ptr(), partial.data_ptr(), q.data_ptr())
        return q, scale


class _EmptyPlan(Plan):
    """No elements, but perhaps rows: their scales are those of all-zero groups."""

    __slots__ = ("_device", "_outputs", "_value")

    def __init__(self, device: int, outputs: Sequence[Output], pow2: bool) -> None:
        super().__init__()
        self._device = "cpu" if device < 0 else f"cuda:{device}"
        self._outputs, self._value = outputs, empty_scale(pow2)

    def run(self, x: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.full(shape, self._value, dtype=dtype, device=self._device)
            if dtype == torch.float32
            else torch.empty(shape, dtype=dtype, device=self._device)
            for shape, dtype in self._outputs
        )


def _layout(output: Output) -> tuple[Any, ...]:
    """Return the arguments of an allocator."""
    shape, dtype = output
    return tuple(shape), dense_strides(shape), dtype


def q_shape(shape: Sequence[int], granularity: str) -> tuple[int, ...]:
    """Return the shape of the codes of a tensor of `shape`."""
    return (shape[-1], row_count(shape)) if granularity == "group_t" else tuple(shape)


def _plan_quantize(x: Metadata, granularity: str, dtype: torch.dtype, pow2: bool, layout: str, align: int):
    check_quantize(x, granularity, dtype, layout)
    t, f, shape = token("x", x[0]), token("the result", dtype, FP8_DTYPES), x[1]
    q, scale = (q_shape(shape, granularity), dtype), (scale_shape(shape, granularity, layout), torch.float32)
    if 0 in shape:
        return _EmptyPlan(x[3], (q, scale), pow2)
    if row_stride(shape, x[2]) is None:
        return None
    m = Matrix(x, align, WIDTH[t], flat=granularity == "tensor")
    if granularity != "tensor":
        how = m, t, f, pow2
        launch = codes_launch(*how, granularity, layout) if m.vec == 1 else _BY_GRANULARITY[granularity](*how, layout)
        return _QuantizePlan(launch, m.device, q, scale)
    if m.vec > 1 and m.rows == 1 and m.cols * x[0].itemsize <= _SMALL_BYTES:
        grid = -(-m.cols // (m.vec * _SMALL_THREADS))
        launch = SMALL.bind((t, f), m.device, grid, _SMALL_THREADS, ending=(m.cols // m.vec, pow2))
        return _QuantizePlan(launch, m.device, q, scale)
    return _DynamicPlan(m, t, f, pow2, q)


def quantized_rows(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """Launch what gives codes and a scale for each row of a tensor of evenly spaced rows."""
    address = x.data_ptr()
    return QUANTIZE_PLANS[metadata(x), "row", dtype, pow2, "row", address & 15].run(address)


def _plan_both(x: Metadata, granularity: str, dtype: torch.dtype, pow2: bool, layout: str, align: int):
    check_both(x, granularity, dtype, layout)
    t, f, shape = token("x", x[0]), token("the result", dtype, FP8_DTYPES), x[1]
    outputs = [(tuple(shape), dtype), (scale_shape(shape, granularity, layout), torch.float32)]
    outputs.append((q_shape(shape, "group_t"), dtype))
    if granularity == "group":
        outputs.append((scale_shape(shape, "group_t", "row"), torch.float32))
    if 0 in shape:
        return _EmptyPlan(x[3], (*outputs, ((0,), torch.float32))[:4], pow2)
    if row_stride(shape, x[2]) is None:
        return None
    m = Matrix(x, align, WIDTH[t], flat=False)
    if m.vec == 1:
        return _BothPlan(both_launch(m, t, f, pow2, granularity, layout), m.device, outputs)
    variant, tiles, strips = (t, f), groups_of(m.cols), groups_of(m.rows)
    dims = m.rows, m.cols, m.stride
    if granularity == "group":
        strides = (1, m.rows) if layout == "column" else (tiles, 1)
        beside = 1 if t == "fp32" else 2  # tiles of a block
        grid = -(-tiles // beside), min(strips, _GRID_LIMIT_Y), -(-strips // _GRID_LIMIT_Y)
        ending = (*dims, *strides, pow2)
        launch = GROUP_BOTH.bind(variant, m.device, grid, beside * tile_threads(t), ending=ending)
    else:
        launch = BLOCK_BOTH.bind(variant, m.device, tiles * strips, tile_threads(t), ending=(*dims, tiles, pow2))
    return _BothPlan(launch, m.device, outputs)


def _row(m: Matrix, t: str, f: str, pow2: bool, layout: str) -> Launch:
    vectors = m.cols // m.vec
    if vectors <= _ROW_THREADS * _ROW_CHUNKS:
        kernel, threads = ROW, group_threads(-(-vectors // _ROW_CHUNKS), _ROW_THREADS)
    else:
        kernel, threads = ROW_LONG, group_threads(vectors, 1024)
    block = block_of(threads)
    grid = min(-(-m.rows // (block // threads)), GRID_LIMIT)
    return kernel.bind((t, f, m.vec), m.device, grid, block, ending=(m.rows, m.cols, m.stride, threads, pow2))


def _group(m: Matrix, t: str, f: str, pow2: bool, layout: str) -> Launch:
    rows, cols, stride = m.rows, m.cols, m.stride
    groups = groups_of(cols)
    strides = (1, rows) if layout == "column" else (groups, 1)
    if layout == "row" and stride == cols and cols % GROUP == 0 and rows * groups % _SECTOR_SCALES == 0:
        # No group ends early and none is followed by a gap: rows of any length will do.
        rows, cols, groups = rows * groups // _SECTOR_SCALES, _SECTOR_SCALES * GROUP, _SECTOR_SCALES
        stride, strides = cols, (groups, 1)
    teams, sets = 32 * m.vec // GROUP, 8
    across = 1 if layout == "column" or groups < _SECTOR_SCALES else _SECTOR_SCALES // teams
    tiles = -(-groups // (across * teams))
    grid = tiles * -(-rows // (_GROUP_THREADS // 32 * sets // across))
    ending = (rows, cols, stride, *strides, tiles, pow2)
    return GROUPED.bind((t, f, m.vec, across), m.device, grid, _GROUP_THREADS, ending=ending)


def _block(m: Matrix, t: str, f: str, pow2: bool, layout: str) -> Launch:
    tiles = groups_of(m.cols)
    threads = GROUP * GROUP // (8 * m.vec)
    ending = (m.rows, m.cols, m.stride, tiles, pow2)
    return BLOCK.bind((t, f, m.vec), m.device, tiles * groups_of(m.rows), threads, ending=ending)


def tile_threads(t: str) -> int:
    """Return the threads of a block that holds a tile of 128 x 128 (quant/tile.cuh)."""
    return GROUP // WIDTH[t] * 16


def _group_t(m: Matrix, t: str, f: str, pow2: bool, layout: str) -> Launch:
    tiles = groups_of(m.cols)
    ending = (m.rows, m.cols, m.stride, tiles, pow2)
    return GROUPED_T.bind((t, f), m.device, tiles * groups_of(m.rows), tile_threads(t), ending=ending)


_BY_GRANULARITY: dict[str, Callable[..., Launch]] = {
    "row": _row,
    "group": _group,
    "block": _block,
    "group_t": _group_t,
}


class _StaticPlan(DensePlan):
    __slots__ = ()

    def run(self, x: int, scale: int) -> Tensor:
        q = self.allocate(*self.layout)
        if self.launch is not None:
            self.launch(x, scale, 0, q.data_ptr())
        return q


def _plan_static(x: Metadata, scale: Metadata, dtype: torch.dtype, align: int):
    check_quantize(x, "tensor", dtype, "row")
    check_static_scale(scale, x[3])
    t, f, memory = token("x", x[0]), token("the result", dtype, FP8_DTYPES), dense_memory(x[3], x[1], dtype)
    if 0 in x[1]:
        return _StaticPlan(None, *memory)
    if row_stride(x[1], x[2]) is None:
        return None
    m = Matrix(x, align, WIDTH[t], flat=True)
    if m.vec == 1:
        return _StaticPlan(static_launch(m, t, f), *memory)
    cut = m.runs(4)
    ending = (m.rows, m.cols, m.stride, *cut[:2], 0, 0)
    return _StaticPlan(TENSOR.bind((t, f, m.vec), m.device, cut.grid, cut.block, ending=ending), *memory)


QUANTIZE_PLANS = Plans(_plan_quantize)
BOTH_PLANS = Plans(_plan_both)
STATIC_PLANS = Plans(_plan_static)
