"""Launch planning of ``glu_fp8`` and ``glu_fp8_backward``: shapes, checks, and metadata to launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_fp8_kernels import ANY, BWD, BWD_STREAM, FAST_TYPES, FWD, FWD_STREAM
from rtkernels.ops.act.glu_plan import ACT_TYPES, check_inputs, result_shape
from rtkernels.ops.shared import fp8_layout
from rtkernels.ops.shared.column_sum import column_sum_step
from rtkernels.ops.shared.fp8_layout import GROUP, MAX_EXPERTS, Fp8Layout, groups_of, row_blocks_of
from rtkernels.ops.shared.tile_stream import TILE_BYTES, stream_steps, supported, tile_map
from rtkernels.runtime.checks import check_dtype, check_same
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.layout import row_count, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

KEEPS = ("fp8", "dense", "both")

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # the numbers that glu_fp8_any takes
ACTS = {act: number for number, act in enumerate(ACT_TYPES)}
_THREADS = 512
_FAST_THREADS = 256
_STATIC_SHARED = 26624
_FAST_STATIC_SHARED = 23104
_STREAM_STATIC_SHARED = 36096
_RESERVED_SHARED = 1024  # per block, by the hardware
_IN_REGISTERS = 2  # of a thread's rows of the last input, kept in registers by the backward
_RESIDENT = 2  # fast blocks per SM, limited by their registers
_MANY_TILES = 8  # tiles per resident block, from which on the backward has a block for each tile; measured on the H200


def _fast_shared(inputs: int, table: int) -> int:
    """Return the dynamic shared memory of a fast kernel: tiles of the inputs that it keeps there, and the table."""
    return table + (8 * inputs - (_IN_REGISTERS if inputs == 3 else 0)) * 16 * _FAST_THREADS


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def experts_of(counts: Meta | None) -> int | None:
    """Return the number of experts, None without counts."""
    return None if counts is None else counts.shape[0]


def check_options(layout: str, scale_layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together."""
    fp8_layout.check_option("layout", layout, fp8_layout.LAYOUTS)
    fp8_layout.check_option("scale_layout", scale_layout, fp8_layout.SCALE_LAYOUTS)
    if layout == "transposed" and scale_layout == "column":
        raise ArgumentError("scale_layout 'column' is for the scales of rows, which layout 'transposed' does not have")


def check_counts(counts: Meta | None, rows: int) -> None:
    """Raise an ArgumentError unless the dtype and shape of counts fit (their values are never read)."""
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    if counts is None:
        return
    check_dtype("counts", counts.dtype)
    if counts.dim() != 1:
        raise ArgumentError(f"counts has shape {tuple(counts.shape)}; expected one dimension, the rows of each expert")
    if not 1 <= counts.shape[0] <= MAX_EXPERTS:
        raise ArgumentError(f"counts has {counts.shape[0]} elements; expected the rows of 1 to {MAX_EXPERTS} experts")


def check_forward(
    x: Meta, up: Meta | None, weight: Meta | None, counts: Meta | None, act: str, layout: str = "row",
    scale_layout: str = "row",
) -> tuple[int, ...]:  # fmt: skip
    """Raise an ArgumentError for arguments that do not fit together; return the shape of the result."""
    check_options(layout, scale_layout)
    shape = check_inputs(x, up, weight, act)
    check_counts(counts, row_count(shape))
    if shape[-1] >= 2**30:
        raise ArgumentError(f"gate has {shape[-1]} columns; expected fewer than 2**30")
    return shape


def check_backward(
    dy: Meta, x: Meta, up: Meta | None, weight: Meta | None, counts: Meta | None, act: str, layout: str, keep: str,
    weight_grad: bool, scale_layout: str = "row",
) -> tuple[int, ...]:  # fmt: skip
    """Raise an ArgumentError for arguments that do not fit together; return the shape of the gradient."""
    shape = check_forward(x, up, weight, counts, act, layout, scale_layout)
    fp8_layout.check_option("keep", keep, KEEPS)
    check_same("dy", dy.dtype, x.dtype, "dtype")
    check_same("dy", tuple(dy.shape), shape, "shape", of="the result")
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")
    return (*shape[:-1], 2 * shape[-1])


def outputs_fwd(x, up, counts, layout, scale_layout):
    check_options(layout, scale_layout)
    return Fp8Layout(result_shape(x, up), layout, scale_layout, experts_of(counts)).outputs()


def outputs_bwd(dy, x, weight, counts, layout, keep, weight_grad, scale_layout="row"):
    check_options(layout, scale_layout)
    shape = (*dy.shape[:-1], 2 * dy.shape[-1])
    codes = Fp8Layout(shape, "" if keep == "dense" else layout, scale_layout, experts_of(counts)).outputs()
    dx = None if keep == "fp8" else Memory(shape, x.dtype)
    return *codes, dx, Memory.like(weight) if weight_grad else None


_INPUTS, _CODES = ("weight", "counts"), ("q", "scale", "q_t", "scale_t")


class Inputs(NamedTuple):
    """Arguments that forward and backward share."""

    x: Meta
    up: Meta | None
    weight: Meta | None
    counts: Meta | None
    act: str
    layout: str
    pow2_scale: bool
    scale_layout: str
    check_counts: bool

    def sources(self, dy: Meta | None) -> list[Meta]:
        """Return dy in the backward, gate, and up or what it is a part of."""
        return [meta for meta in (dy, self.x, self.x if self.up is None else self.up) if meta is not None]

    def options(self, blocks: int) -> tuple[int, ...]:
        """Return the numbers that all kernels take. `blocks`: of 128 rows, as many as there can be."""
        width = 4 if self.counts is None else self.counts.dtype.itemsize
        flags = int(self.scale_layout == "column"), int(self.pow2_scale), int(self.check_counts)
        return experts_of(self.counts) or 0, width, blocks, *flags


def plan_fwd(inputs: Inputs, device: int) -> Steps:
    return _steps(inputs, None, False, inputs.layout != "row", False, device)


def plan_bwd(dy: Meta, inputs: Inputs, keep: str, weight_grad: bool, device: int) -> Steps:
    codes = keep != "dense"
    # Else a group of a row of the gradient has columns of gate and of up, as only the generic kernel can have it.
    mixed = codes and inputs.layout != "transposed" and dy.shape[-1] % GROUP != 0
    return _steps(inputs, dy, mixed, codes and inputs.layout != "row", weight_grad, device)


def _steps(given: Inputs, dy: Meta | None, mixed: bool, transposed: bool, weight_grad: bool, device: int) -> Steps:
    """Return the launch of a kernel for transposed codes if requested, otherwise of a fast or of the generic kernel."""
    x, up, weight, counts = given[:4]
    rows, cols = row_count(x.shape), (x.shape[-1] // 2 if up is None else x.shape[-1])
    blocks = row_blocks_of(rows, experts_of(counts))
    sources = given.sources(dy)
    strides = [meta.row_stride for meta in sources]
    info, table = device_info(device), 16 * ((experts_of(counts) or 0) // 2 + 1)
    tiles, size = blocks * groups_of(cols), x.dtype.itemsize
    after, scratch, gradients = [], {}, () if dy is None else ("dx", "partial" if weight_grad else 0)
    if weight_grad:
        groups = groups_of(cols)
        scratch = {"partial": Memory((groups, rows), torch.float32)}
        after = [column_sum_step("partial", "dweight", groups, rows, weight.dtype, device)]
    vector = vector_bytes(misaligned(*sources), cols * size, *(s * size for s in strides))
    fast = given.act == "silu" and x.dtype in FAST_TYPES and vector == 16 and max(strides) < 2**31 and not mixed
    shared = _fast_shared(len(sources), table)
    space = (2 if dy is None else 5) * TILE_BYTES + table  # one tile of each input, two of gate and dy in the backward
    streams = space + _STREAM_STATIC_SHARED <= info.shared_per_block and min(strides) >= cols
    streams = fast and transposed and streams and supported(info.target)
    fast = fast and FWD.variants(info.target) and shared + _FAST_STATIC_SHARED <= info.shared_per_block
    if not (streams or fast):
        step = generic_step(given, dy, blocks, (*_CODES, *(gradients or (0, 0)), 0, 0), device, mixed)
        return Steps(step, *after, scratch=scratch)
    converted = {"weight": torch.float32} if weight is not None and weight.dtype != torch.float32 else None
    if streams:
        t, half = FAST_TYPES[x.dtype], 0 if up is not None else cols * size
        names = ["dy"] * (dy is not None) + ["x", "x" if up is None else "up"]
        maps = [tile_map(n, t, rows, cols, s) for n, s in zip(names, strides, strict=True)]
        maps[-1] = maps[-1]._replace(offset=half)  # up follows gate in each row
        kernel, tensors = FWD_STREAM if dy is None else BWD_STREAM, (*_INPUTS, *_CODES, *gradients)
        variant, numbers = (t, counts is not None), (rows, cols, *given.options(blocks))
        steps = stream_steps(kernel, variant, device, tiles, space, maps, tensors, numbers, *after, scratch=scratch)
    else:
        grid = tiles
        if dy is None or tiles < _MANY_TILES * _RESIDENT * info.sm_count:
            grid = _grid(tiles, _RESIDENT, shared + _FAST_STATIC_SHARED, info)
        launch = (FWD if dy is None else BWD).bind((FAST_TYPES[x.dtype],), device, grid, _FAST_THREADS, shared)
        tensors = (*(["dy"] * (dy is not None)), "x", "up", *_INPUTS, *_CODES, *gradients)
        steps = Steps(Step(launch, *tensors, rows, cols, *strides, *given.options(blocks)), *after, scratch=scratch)
    steps.converted = converted
    return steps


def generic_step(
    given: Inputs, dy: Meta | None, blocks: int, results: tuple[str | int, ...], device: int, mixed: bool = False,
    pad_to: int = 1,
) -> Step:  # fmt: skip
    """Return the launch of the generic kernel. `results`: its arguments from the codes to the factor and maxima."""
    x, _, weight, counts = given[:4]
    sources = given.sources(dy)
    rows, cols = row_count(x.shape), x.shape[-1] // (2 if given.up is None else 1)
    strides, size = [meta.row_stride for meta in sources], x.dtype.itemsize
    experts, info = experts_of(counts) or 0, device_info(device)
    tiles = blocks * groups_of(2 * cols if mixed else cols)
    shared = 4 * GROUP * GROUP + 16 * (experts // 2 + 1)
    if shared + _STATIC_SHARED > info.shared_per_block:
        raise ArgumentError(f"counts has {experts} elements; their table does not fit into this GPU's shared memory")
    grid = _grid(tiles, 2, shared + _STATIC_SHARED, info)
    launch = ANY.bind((x.dtype == torch.float32, mixed), device, grid, _THREADS, shared)
    words = vector_bytes(misaligned(*sources), cols * size, *(s * size for s in strides)) >= 4 * size
    sizes = rows, cols, *([0] * (dy is None)), *strides, 0 if weight is None else TYPES[weight.dtype]
    last = ACTS[given.act], TYPES[x.dtype], int(words), pad_to
    inputs = 0 if dy is None else "dy", "x", "up", *_INPUTS
    return Step(launch, *inputs, *results, *sizes, *given.options(blocks), *last)


def _grid(tiles: int, resident: int, shared: int, info: DeviceInfo) -> int:
    """Return the number of blocks of a persistent grid: all that can be resident at the same time."""
    if resident * (shared + _RESERVED_SHARED) > info.shared_per_block + _RESERVED_SHARED:
        resident = 1
    return min(tiles, resident * info.sm_count)
