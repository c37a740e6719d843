"""Launch planning of ``glu_fp8`` and ``glu_fp8_backward``: shapes, checks, and metadata to launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels._kernel import Kernel, Plans, allocator, dense_strides, device_info
from rtkernels._layout import check_same, row_count, row_stride, token, vector_bytes
from rtkernels.errors import ArgumentError
from rtkernels.ops.glu import ACT_TYPES, check_inputs, is_dense, is_wide

GROUP = 128
LAYOUTS = ("row", "transposed", "both")
SCALE_LAYOUTS = ("row", "column")
KEEPS = ("fp8", "dense", "both")
E4M3 = torch.float8_e4m3fn

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)
Output = tuple[Sequence[int], torch.dtype]  # shape and dtype of a dense result

_UNIT = "act/glu_quant.cu"
_TYPES = ("bf16", "fp16", "fp32")
_VARIANTS = [(t, act) for t in _TYPES for act in ACT_TYPES.values()]
_TAIL_ARGS = "up_offset:i64 weight_wide:i64 experts:i64 count_width:i64 row_blocks:i64 by_group:i64 slots:i64 "
_TAIL_ARGS += "table_bytes:i64 pow2:i64"
_ALIGNED = 8  # columns; what a thread stores at a time
_THREADS = {8: 256, 4: 512}  # of a block whose threads have 8 or 4 columns
_STATIC_SHARED = {8: 22080, 4: 26112}
_RESERVED_SHARED = 1024  # per block, by the hardware

FWD = Kernel(
    _UNIT,
    "glu_fp8_fwd",
    template="T Act",
    args="gate:ptr up:ptr weight:ptr counts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr rows:i64 cols:i64 pitch:i64 "
    f"gate_stride:i64 up_stride:i64 {_TAIL_ARGS}",
    variants=_VARIANTS,
    max_registers=128,
)
BWD = Kernel(
    _UNIT,
    "glu_fp8_bwd",
    template="T Act",
    args="dy:ptr gate:ptr up:ptr weight:ptr counts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr dx:ptr partial:ptr rows:i64 "
    f"cols:i64 pitch:i64 dy_stride:i64 gate_stride:i64 up_stride:i64 {_TAIL_ARGS}",
    variants=_VARIANTS,
    max_registers=128,
)


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def groups_of(size: int) -> int:
    """Return how many groups of 128 cover `size` elements."""
    return -(-size // GROUP)


def row_blocks_of(rows: int, experts: int | None) -> int:
    """Return the row blocks of `rows` rows: the most there can be, if they belong to experts."""
    return groups_of(rows) if experts is None else (rows + (GROUP - 1) * experts) // GROUP


def output_shapes(
    shape: Sequence[int], experts: int | None, layout: str, scale_layout: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of q, scale, q_t and scale_t of a tensor of `shape`; (0,) for what `layout` leaves out."""
    rows, cols = row_count(shape), shape[-1]
    q = scale = q_t = scale_t = (0,)
    if layout != "transposed":
        q = tuple(shape)
        scale = (*shape[:-1], groups_of(cols))
        if scale_layout == "column":
            scale = (groups_of(cols), rows) if experts is None else (groups_of(cols) * rows,)
    if layout != "row":
        q_t = (cols, rows) if experts is None else (cols * rows,)
        scale_t = (row_blocks_of(rows, experts), cols)
    return q, scale, q_t, scale_t


def quantized_outputs(shape: Sequence[int], experts: int | None, layout: str, scales: str) -> list[Output | None]:
    """Return shape and dtype of q, scale, q_t and scale_t, None for what `layout` leaves out."""
    shapes = output_shapes(shape, experts, layout, scales)
    asked = (layout != "transposed",) * 2 + (layout != "row",) * 2
    kinds = (E4M3, torch.float32) * 2
    return [(s, kind) if wanted else None for s, kind, wanted in zip(shapes, kinds, asked, strict=True)]


def experts_of(counts: Metadata | None) -> int | None:
    """Return the number of experts, None without counts."""
    return None if counts is None else counts[1][0]


def check_options(layout: str, scale_layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together."""
    for name, value, accepted in (("layout", layout, LAYOUTS), ("scale_layout", scale_layout, SCALE_LAYOUTS)):
        if value not in accepted:
            raise ArgumentError(f"{name} is {value!r}; expected one of {', '.join(map(repr, accepted))}")
    if layout == "transposed" and scale_layout == "column":
        raise ArgumentError("scale_layout 'column' is for the scales of rows, which layout 'transposed' does not have")


def check_counts(counts: Metadata | None, rows: int, device: int) -> None:
    """Raise an ArgumentError unless counts can be the rows of each expert (their values are never looked at)."""
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    if counts is None:
        return
    if counts[0] not in (torch.int32, torch.int64):
        raise ArgumentError(f"counts has dtype {str(counts[0]).removeprefix('torch.')}; expected one of int32, int64")
    if len(counts[1]) != 1:
        raise ArgumentError(f"counts has shape {tuple(counts[1])}; expected one dimension, the rows of each expert")
    check_same("counts", counts[3], device, "device index")


def check_forward(
    x: Metadata,
    up: Metadata | None,
    weight: Metadata | None,
    counts: Metadata | None,
    act: str,
    layout: str,
    scales: str,
) -> tuple[int, ...]:
    """Raise an ArgumentError for arguments that do not fit together; return the shape of the result."""
    check_options(layout, scales)
    shape = check_inputs(x, up, weight, act)
    check_counts(counts, row_count(shape), x[3])
    return shape


def check_backward(
    dy: Metadata,
    x: Metadata,
    up: Metadata | None,
    weight: Metadata | None,
    counts: Metadata | None,
    act: str,
    layout: str,
    scales: str,
    keep: str,
    weight_grad: bool,
) -> tuple[int, ...]:
    """Raise an ArgumentError for arguments that do not fit together; return the shape of the gradient."""
    shape = check_forward(x, up, weight, counts, act, layout, scales)
    if keep not in KEEPS:
        raise ArgumentError(f"keep is {keep!r}; expected one of {', '.join(map(repr, KEEPS))}")
    check_same("dy", dy[0], x[0], "dtype")
    check_same("dy", tuple(dy[1]), shape, "shape", of="the result")
    check_same("dy", dy[3], x[3], "device index")
    if keep != "dense" and layout != "transposed" and shape[-1] % GROUP:
        raise ArgumentError(
            f"gate has {shape[-1]} columns; expected a multiple of 128 for layout {layout!r}: groups of 128 columns of "
            f"the gradient would reach from gate into up"
        )
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")
    return (*shape[:-1], 2 * shape[-1])


# ---- plans ----------------------------------------------------------------------------------------------------------


class Plan:
    """One launch that writes everything: outputs in the order of the kernel's arguments."""

    __slots__ = ("_allocate", "_args", "_launch", "_outputs")

    def __init__(self, launch: Any, args: tuple[int, ...], device: int, outputs: Sequence[Output | None]) -> None:
        self._launch, self._args, self._allocate = launch, args, allocator(device)
        self._outputs = tuple(o and (tuple(o[0]), dense_strides(o[0]), o[1]) for o in outputs)

    def run(self, *inputs: int) -> tuple[Tensor | None, ...]:
        """Launch on the addresses of the inputs and return the outputs, None for those that nobody asked for."""
        allocate = self._allocate
        outputs = tuple([o and allocate(*o) for o in self._outputs])
        if self._launch is not None:
            self._launch(*inputs, *[0 if o is None else o.data_ptr() for o in outputs], *self._args)
        return outputs


def geometry(
    t: str, width: int, inputs: int, experts: int | None, blocks: int, tiles: int, device: int
) -> tuple[int, int, int, int]:
    """Return the grid, the slots, the bytes of the experts' table and all dynamic shared memory of a kernel.

    Args:
        t: Token of the inputs' dtype.
        width: Columns of a thread.
        inputs: How many tiles a block reads at a time.
        experts: How many there are, None for none.
        blocks: Resident blocks per multiprocessor that registers allow.
        tiles: All tiles.
        device: Index.
    """
    slot = GROUP * GROUP * (4 if t == "fp32" else 2)
    info = device_info(device)
    limit = info.shared_per_block
    table = 16 * ((experts or 0) // 2 + 1)
    slots = min(inputs, (limit - _STATIC_SHARED[width] - table) // slot)
    if slots < 1:
        raise ArgumentError(f"counts has {experts} experts; their table does not fit into shared memory")
    shared = slots * slot + table
    each = shared + _STATIC_SHARED[width] + _RESERVED_SHARED
    resident = blocks if blocks * each <= limit + _RESERVED_SHARED else 1
    return min(tiles, resident * info.sm_count), slots, table, shared


def padded(cols: int) -> int:
    """Return the columns that rows of inputs, codes and dense gradients need in memory."""
    return -(-cols // _ALIGNED) * _ALIGNED


def _aligned(dtype: torch.dtype, align: int, cols: int, *strides: int) -> bool:
    return cols % _ALIGNED == 0 and vector_bytes(align, *(s * dtype.itemsize for s in strides)) == 16


def _tail(
    up: Metadata | None,
    weight: Metadata | None,
    counts: Metadata | None,
    pitch: int,
    row_blocks: int,
    scales: str,
    slots: int,
    table: int,
    pow2: bool,
) -> tuple[int, ...]:
    """Return the numbers that both kernels end with."""
    width = 4 if counts is None else counts[0].itemsize
    offset = pitch if up is None else 0
    by_group = int(scales == "column")
    return offset, int(is_wide(weight)), experts_of(counts) or 0, width, row_blocks, by_group, slots, table, int(pow2)


def _plan_fwd(
    x: Metadata,
    up: Metadata | None,
    weight: Metadata | None,
    counts: Metadata | None,
    act: str,
    layout: str,
    pow2: bool,
    scales: str,
    cols: int | None,
    align: int,
) -> Plan | str:
    """Return a plan, or what to do with the inputs first: "dense" or "aligned". `cols`: those that count."""
    shape = check_forward(x, up, weight, counts, act, layout, scales)
    dtype, device = x[0], x[3]
    rows, pitch, experts = row_count(shape), shape[-1], experts_of(counts)
    cols = pitch if cols is None else cols
    outputs = quantized_outputs((*shape[:-1], cols), experts, layout, scales)
    row_blocks = row_blocks_of(rows, experts)
    if cols == 0 or row_blocks == 0:
        return Plan(None, (), device, outputs)
    gate_stride = row_stride(x[1], x[2])
    up_stride = gate_stride if up is None else row_stride(up[1], up[2])
    if gate_stride is None or up_stride is None or not is_dense(weight) or (counts and counts[2] != (1,)):
        return "dense"
    if not _aligned(dtype, align, pitch, gate_stride, up_stride):
        return "aligned"
    if outputs[0] is not None:
        outputs[0] = (shape, E4M3)
    t, width = token("x", dtype), 16 // dtype.itemsize
    tiles = row_blocks * groups_of(cols)
    grid, slots, table, shared = geometry(t, width, 2, experts, 2 if width == 8 else 1, tiles, device)
    launch = FWD.bind((t, ACT_TYPES[act]), device, grid, _THREADS[width], shared)
    args = (rows, cols, pitch, gate_stride, up_stride)
    args += _tail(up, weight, counts, pitch, row_blocks, scales, slots, table, pow2)
    return Plan(launch, args, device, outputs)


def _plan_bwd(
    dy: Metadata,
    x: Metadata,
    up: Metadata | None,
    weight: Metadata | None,
    counts: Metadata | None,
    act: str,
    layout: str,
    pow2: bool,
    scales: str,
    keep: str,
    weight_grad: bool,
    cols: int | None,
    align: int,
) -> Plan | str:
    """As _plan_fwd."""
    if cols is None:
        check_backward(dy, x, up, weight, counts, act, layout, scales, keep, weight_grad)
    dtype, device = x[0], x[3]
    lead, pitch = tuple(dy[1][:-1]), dy[1][-1]
    rows, experts = row_count(dy[1]), experts_of(counts)
    cols = pitch if cols is None else cols
    outputs: list[Output | None] = [None] * 4
    if keep != "dense":
        outputs = quantized_outputs((*lead, 2 * cols), experts, layout, scales)
    outputs.append(((*lead, 2 * pitch), dtype) if keep != "fp8" else None)
    outputs.append(((groups_of(cols), rows), torch.float32) if weight_grad else None)
    row_blocks = row_blocks_of(rows, experts)
    if cols == 0 or row_blocks == 0:
        return Plan(None, (), device, outputs)
    strides = [row_stride(m[1], m[2]) for m in (dy, x, x if up is None else up)]
    if None in strides or not is_dense(weight) or (counts and counts[2] != (1,)):
        return "dense"
    if not _aligned(dtype, align, pitch, *strides):
        return "aligned"
    t, width = token("x", dtype), 4
    tiles = row_blocks * groups_of(cols)
    grid, slots, table, shared = geometry(t, width, 3, experts, 1, tiles, device)
    launch = BWD.bind((t, ACT_TYPES[act]), device, grid, _THREADS[width], shared)
    args = (rows, cols, pitch, *strides)
    args += _tail(up, weight, counts, pitch, row_blocks, scales, slots, table, pow2)
    return Plan(launch, args, device, outputs)


FWD_PLANS = Plans(_plan_fwd)
BWD_PLANS = Plans(_plan_bwd)
