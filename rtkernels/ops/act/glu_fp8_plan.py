"""Launch planning of ``glu_fp8`` and ``glu_fp8_backward``: shapes, checks, and metadata to launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu import ACT_TYPES, check_inputs
from rtkernels.ops.act.glu_fp8_kernels import ANY, BWD, BWD_STREAM, FAST_TYPES, FWD, FWD_STREAM
from rtkernels.ops.shared.tile_stream import TILE_BYTES, PatchLaunch, supported
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.memory import allocator, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import check_same, is_dense, row_count, row_stride, vector_bytes

GROUP = 128
LAYOUTS = ("row", "transposed", "both")
SCALE_LAYOUTS = ("row", "column")
KEEPS = ("fp8", "dense", "both")
E4M3 = torch.float8_e4m3fn
MAX_EXPERTS = 8192  # their table is in shared memory

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)
Output = tuple[Sequence[int], torch.dtype]  # shape and dtype of a dense result

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # the numbers that glu_fp8_any takes
ACTS = {act: number for number, act in enumerate(ACT_TYPES)}
_THREADS, _FAST_THREADS = 512, 256
_STATIC_SHARED, _FAST_STATIC_SHARED, _STREAM_STATIC_SHARED = 26624, 23104, 36096
_RESERVED_SHARED = 1024  # per block, by the hardware
_LATE = 2  # of a thread's rows of the last input, kept in registers by the backward
_RESIDENT = 2  # fast blocks per multiprocessor, as their registers allow
_MANY_TURNS = 8  # tiles per resident block, from which on the backward has a block for each tile; measured on the H200


def _fast_shared(inputs: int, table: int) -> int:
    """Return the dynamic shared memory of a fast kernel: tiles of the inputs that it keeps there, and the table."""
    return table + (8 * inputs - (_LATE if inputs == 3 else 0)) * 16 * _FAST_THREADS


# ---- shapes and checks, shared by launchers, references and fakes ---------------------------------------------------


def groups_of(size: int) -> int:
    """Return how many groups of 128 cover `size` elements."""
    return -(-size // GROUP)


def row_blocks_of(rows: int, experts: int | None) -> int:
    """Return the row blocks of `rows` rows: the most there can be, if they belong to experts."""
    return groups_of(rows) if experts is None else (rows + (GROUP - 1) * min(experts, rows)) // GROUP


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
    if not 1 <= counts[1][0] <= MAX_EXPERTS:
        raise ArgumentError(f"counts has {counts[1][0]} elements; expected the rows of 1 to {MAX_EXPERTS} experts")
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
    if shape[-1] >= 2**30:
        raise ArgumentError(f"gate has {shape[-1]} columns; expected fewer than 2**30")
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
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")
    return (*shape[:-1], 2 * shape[-1])


# ---- plans ----------------------------------------------------------------------------------------------------------


class Plan:
    """One launch that writes everything: outputs in the order of the kernel's arguments.

    A kernel that `takes_gradients` without having any gets nulls for them: dy before the inputs, dx and the weight's
    after the outputs.
    """

    __slots__ = ("_after", "_allocate", "_args", "_before", "_launch", "_outputs")

    def __init__(
        self,
        launch: Any,
        args: tuple[int, ...],
        device: int,
        outputs: Sequence[Output | None],
        takes_gradients: bool = False,
    ) -> None:
        self._launch, self._allocate = launch, allocator(device)
        self._before, self._after = ((0,), (0, 0, *args)) if takes_gradients else ((), args)
        self._outputs = tuple(o and (tuple(o[0]), dense_strides(o[0]), o[1]) for o in outputs)

    def run(self, *inputs: int, extra: tuple[int, ...] = ()) -> tuple[Tensor | None, ...]:
        """Launch on the addresses of the inputs and return the outputs, None for those that nobody asked for.

        `extra`: addresses that come after those of the outputs.
        """
        allocate = self._allocate
        outputs = tuple([o and allocate(*o) for o in self._outputs])
        if self._launch is not None:
            addresses = [0 if o is None else o.data_ptr() for o in outputs]
            self._launch(*self._before, *inputs, *addresses, *extra, *self._after)
        return outputs


class PatchPlan(Plan):
    """A plan whose kernel takes tensor maps of dy (in the backward), gate and up."""

    __slots__ = ("_half", "_matrices")

    def __init__(
        self, launch: PatchLaunch, args: tuple[int, ...], device: int, outputs: Sequence[Output | None],
        matrices: int, half: int,
    ) -> None:  # fmt: skip
        super().__init__(launch, args, device, outputs)
        self._matrices, self._half = matrices, half

    def run(self, *inputs: int, extra: tuple[int, ...] = ()) -> tuple[Tensor | None, ...]:
        matrices, others = list(inputs[: self._matrices]), inputs[self._matrices :]
        if not matrices[-1]:
            matrices[-1] = matrices[-2] + self._half  # up follows gate in each row
        outputs = tuple([o and self._allocate(*o) for o in self._outputs])
        addresses = [0 if o is None else o.data_ptr() for o in outputs]
        self._launch(matrices, [*others, *addresses], self._after)
        return outputs


class Inputs(NamedTuple):
    """What both directions have in common."""

    x: Metadata
    up: Metadata | None
    weight: Metadata | None
    counts: Metadata | None
    act: str
    layout: str
    pow2: bool
    scales: str
    check: bool


def bound_launch(
    given: Inputs,
    dy: Metadata | None,
    shape: Sequence[int],
    blocks: int,
    align: int,
    any_case: bool = False,
    mixed: bool = False,
    transposed: bool = False,
) -> tuple[Any, tuple[int, ...], bool] | None:
    """Return a bound launch, the numbers it ends with, and whether its kernel always takes gradients.

    None if the inputs have to be made dense first, and the weight fp32.

    Args:
        given: The inputs.
        dy: The incoming gradient, None in the forward.
        shape: Of the result of the forward.
        blocks: The most blocks of 128 rows that there can be.
        align: Of all inputs' addresses.
        any_case: Use the kernel for everything, whatever the inputs are.
        mixed: A group of a row of the gradient has columns of gate and of up, as only that kernel can have it.
        transposed: Transposed codes are among the results, so that kernels for them may be used.
    """
    x, up, weight, counts = given[:4]
    dtype, device = x[0], x[3]
    rows, cols, experts = row_count(shape), shape[-1], experts_of(counts)
    sources = [m for m in (dy, x, x if up is None else up) if m is not None]
    strides = [row_stride(m[1], m[2]) for m in sources]
    if None in strides or not is_dense(weight) or (counts and counts[2] != (1,)):
        return None
    options = (experts or 0, 4 if counts is None else counts[0].itemsize, blocks)
    options += (int(given.scales == "column"), int(given.pow2), int(given.check))
    info, table = device_info(device), 16 * ((experts or 0) // 2 + 1)
    tiles = blocks * groups_of(cols)
    vector = vector_bytes(align, cols * dtype.itemsize, *(s * dtype.itemsize for s in strides))
    fast = given.act == "silu" and dtype in FAST_TYPES and vector == 16 and max(strides) < 2**31
    fast = fast and not (any_case or mixed)
    resident = _RESIDENT * info.sm_count
    shared = _fast_shared(len(sources), table)
    space = (2 if dy is None else 5) * TILE_BYTES + table  # one tile of each input, two of gate and dy in the backward
    fits = space + _STREAM_STATIC_SHARED <= info.shared_per_block and min(strides) >= cols
    if fast and transposed and fits and supported(info.target):
        if weight is not None and weight[0] != torch.float32:
            return None
        layouts = [(FAST_TYPES[dtype], rows, cols, stride) for stride in strides]
        kernel = FWD_STREAM if dy is None else BWD_STREAM
        launch = PatchLaunch(kernel, (FAST_TYPES[dtype], counts is not None), device, tiles, space, layouts)
        return launch, (rows, cols, *options), False
    if fast and FWD.variants(info.target) and shared + _FAST_STATIC_SHARED <= info.shared_per_block:
        if weight is not None and weight[0] != torch.float32:
            return None
        grid = tiles
        if dy is None or tiles < _MANY_TURNS * resident:
            grid = _grid(tiles, _RESIDENT, shared + _FAST_STATIC_SHARED, info)
        kernel = FWD if dy is None else BWD
        launch = kernel.bind((FAST_TYPES[dtype],), device, grid, _FAST_THREADS, shared)
        return launch, (rows, cols, *strides, *options), False
    tiles = blocks * groups_of(2 * cols if mixed else cols)
    shared = 4 * GROUP * GROUP + table
    if shared + _STATIC_SHARED > info.shared_per_block:
        raise ArgumentError(f"counts has {experts} elements; their table does not fit into this GPU's shared memory")
    grid = _grid(tiles, 2, shared + _STATIC_SHARED, info)
    launch = ANY.bind((dtype == torch.float32, mixed), device, grid, _THREADS, shared)
    if dy is None:
        strides.insert(0, 0)
    weight_type = 0 if weight is None else TYPES[weight[0]]
    last = (ACTS[given.act], TYPES[dtype], int(vector >= 4 * dtype.itemsize))
    return launch, (0, 0, rows, cols, *strides, weight_type, *options, *last), True


def _grid(tiles: int, resident: int, shared: int, info: DeviceInfo) -> int:
    """Return how many blocks of a persistent grid there should be: all that are resident at once."""
    if resident * (shared + _RESERVED_SHARED) > info.shared_per_block + _RESERVED_SHARED:
        resident = 1
    return min(tiles, resident * info.sm_count)


def _plan_fwd(*key: Any) -> Plan | None:
    """Return a plan, or None if the inputs have to be made dense first."""
    *given, align = key
    inputs = Inputs(*given)
    x, up, weight, counts, act, layout, _, scales, _ = inputs
    shape = check_forward(x, up, weight, counts, act, layout, scales)
    experts, blocks = experts_of(counts), row_blocks_of(row_count(shape), experts_of(counts))
    outputs = quantized_outputs(shape, experts, layout, scales)
    if shape[-1] == 0 or blocks == 0:
        return Plan(None, (), x[3], outputs)
    bound = bound_launch(inputs, None, shape, blocks, align, transposed=layout != "row")
    if bound is None:
        return None
    launch, args, takes_gradients = bound
    if isinstance(launch, PatchLaunch):
        return PatchPlan(launch, args, x[3], outputs, 2, shape[-1] * x[0].itemsize)
    return Plan(launch, args, x[3], outputs, takes_gradients)


def _plan_bwd(*key: Any) -> Plan | None:
    """As _plan_fwd."""
    dy, *given, keep, weight_grad, align = key
    inputs = Inputs(*given)
    x, up, weight, counts, act, layout, _, scales, _ = inputs
    shape = check_backward(dy, x, up, weight, counts, act, layout, scales, keep, weight_grad)
    experts, rows = experts_of(counts), row_count(shape)
    blocks = row_blocks_of(rows, experts)
    outputs: list[Output | None] = [None] * 4
    if keep != "dense":
        outputs = quantized_outputs(shape, experts, layout, scales)
    outputs.append((shape, x[0]) if keep != "fp8" else None)
    outputs.append(((groups_of(shape[-1] // 2), rows), torch.float32) if weight_grad else None)
    if shape[-1] == 0 or blocks == 0:
        return Plan(None, (), x[3], outputs)
    transposed = layout != "row" and keep != "dense"
    mixed = layout != "transposed" and keep != "dense" and dy[1][-1] % GROUP != 0
    bound = bound_launch(inputs, dy, dy[1], blocks, align, mixed=mixed, transposed=transposed)
    if bound is not None and isinstance(bound[0], PatchLaunch):
        return PatchPlan(*bound[:2], x[3], outputs, 3, dy[1][-1] * x[0].itemsize)
    return None if bound is None else Plan(*bound[:2], x[3], outputs)


FWD_PLANS = Plans(_plan_fwd)
BWD_PLANS = Plans(_plan_bwd)
