"""The kernels of ``group_rms_norm_gate`` and how a call becomes launches of them: checks, strides, geometry."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.column_sum import column_sum_step, overlaps_next, parts_grid
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    TYPES,
    WEIGHTED_TYPES,
    WIDTH,
    block_of,
    divisor,
    group_threads,
    row_stride,
    vector_bytes,
)
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_UNIT = "norm/group_rms_norm_gate.cu"
_BWD_UNIT = "norm/group_rms_norm_gate_bwd.cu"
_LAYOUTS = ("same", "sequence_first")
_ACTS = ("sigmoid", "silu")
_CHUNKS = 2  # 16-byte vectors of each input that a thread owns, or fewer
_THREADS = 512
# Of a block of the backward, for gates other than a sigmoid after the norm: they need more registers.
_OTHER_THREADS = 384
_COUNT_LIMIT = 2**31 - 1024  # the kernels that count in 32 bits take no more, and a block may pass the end


# How the threads of a row lie in warps (RowForm of the kernel).
_LANES, _VECTORS, _WARPS, _TWO_WARPS, _FOUR_WARPS = range(5)
_FORMS = (*((1, form) for form in range(5)), (_CHUNKS, _WARPS))  # and vectors of a thread

_FWD_STRIDES = (
    "tokens:i64 inner_size:i64 groups:i64 cols:i64 x_outer:i64 x_inner:i64 x_group:i64 gate_outer:i64 gate_inner:i64 "
    "y_outer:i64 y_inner:i64 weight_group:i64 threads_per_row:i64"
)
_BWD_POINTERS = "dy:ptr x:ptr gate:ptr weight:ptr dx:ptr dgate:ptr"
_COUNTS = "tokens:i64 inner_size:i64 groups:i64 cols:i64"
_BWD_INPUTS = "dy_outer:i64 dy_inner:i64 x_outer:i64 x_inner:i64 x_group:i64 gate_outer:i64 gate_inner:i64"
_FWD = Kernel(
    _UNIT, "group_rms_norm_gate_fwd", template="T W CHUNKS", max_registers=64,
    args=f"x:ptr gate:ptr weight:ptr y:ptr {_FWD_STRIDES} by_groups:i64 by_inner:i64 form:i64 eps:f64",
    variants=[(t, w, _CHUNKS) for t, w in WEIGHTED_TYPES],
)  # fmt: skip
_FWD_LONG = Kernel(
    _UNIT, "group_rms_norm_gate_fwd_long", template="T", max_registers=88,
    args=f"x:ptr gate:ptr weight:ptr y:ptr {_FWD_STRIDES} weight_fp32:i64 aligned16:i64 form:i64 eps:f64",
    variants=TYPES,
)  # fmt: skip
_BWD = Kernel(
    _BWD_UNIT, "group_rms_norm_gate_bwd", template="T CHUNKS FORM SIGMOID", max_registers=168,
    args=f"{_BWD_POINTERS} partial:ptr {_COUNTS} {_BWD_INPUTS} dgate_outer:i64 dgate_inner:i64 dx_outer:i64 "
    "dx_inner:i64 weight_group:i64 lanes:i64 threads_per_row:i64 by_inner:i64 by_groups:i64 weight_fp32:i64 "
    "overlaps_next:i64 gate_form:i64 eps:f64",
    variants=[(t, c, f, sigmoid) for t in WIDTH for c, f in _FORMS for sigmoid in (True, False)],
)  # fmt: skip
_BWD_LONG = Kernel(
    _BWD_UNIT, "group_rms_norm_gate_bwd_long", template="T", max_registers=96,
    args=f"{_BWD_POINTERS} rstd_out:ptr {_COUNTS} {_BWD_INPUTS} dgate_outer:i64 dgate_inner:i64 dx_outer:i64 "
    "dx_inner:i64 weight_group:i64 threads_per_row:i64 weight_fp32:i64 aligned16:i64 form:i64 eps:f64",
    variants=TYPES,
)  # fmt: skip
_BWD_WEIGHT = Kernel(
    _BWD_UNIT, "group_rms_norm_gate_bwd_weight", template="T", max_registers=48,
    args=f"dy:ptr x:ptr gate:ptr rstd:ptr partial:ptr {_COUNTS} {_BWD_INPUTS} aligned16:i64 form:i64",
    variants=TYPES,
)  # fmt: skip
KERNELS = (_FWD, _FWD_LONG, _BWD, _BWD_LONG, _BWD_WEIGHT)


def check(x: Meta, gate: Meta, weight: Meta | None, groups: int, layout: str, act: str) -> None:
    """Raise an ArgumentError for arguments of the forward that do not fit together."""
    dtype, shape = x[:2]
    token("x", dtype)
    if layout not in _LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; expected one of {', '.join(_LAYOUTS)}")
    if act not in _ACTS:
        raise ArgumentError(f"act is {act!r}; expected one of {', '.join(_ACTS)}")
    split = len(shape) == len(gate[1]) + 1
    if len(shape) < 1 + split:
        raise ArgumentError("x or gate has too few dimensions; expected at least one, the last holds the channels")
    if layout == "sequence_first" and len(shape) != 3 + split:
        raise ArgumentError(
            f"x has shape {tuple(shape)}; layout 'sequence_first' takes [batch, sequence, channels], or "
            f"[batch, sequence, heads, head_dim]"
        )
    lead, channels = (shape[:-2], shape[-2] * shape[-1]) if split else (shape[:-1], shape[-1])
    if layout == "sequence_first":
        lead = (lead[1], lead[0])
    check_same("gate", gate[0], dtype, "dtype")
    if tuple(gate[1]) != (*lead, channels):
        raise ArgumentError(
            f"gate has shape {tuple(gate[1])}; expected {(*lead, channels)} for x of shape {tuple(shape)} and layout "
            f"{layout!r}"
        )
    if groups < 1 or channels % groups:
        raise ArgumentError(f"groups is {groups}; expected a number that divides the {channels} channels")
    if weight is not None:
        token("weight", weight[0], (dtype, torch.float32))
        if tuple(weight[1]) not in ((channels,), (channels // groups,)):
            raise ArgumentError(
                f"weight has shape {tuple(weight[1])}; expected ({channels},), one number for each channel, or "
                f"({channels // groups},), shared by the groups"
            )


def check_bwd(
    dy: Meta, x: Meta, gate: Meta, weight: Meta | None, groups: int, layout: str, act: str, weight_grad: bool
) -> None:  # fmt: skip
    """Raise an ArgumentError for arguments of the backward that do not fit together."""
    check(x, gate, weight, groups, layout, act)
    check_same("dy", dy[0], x[0], "dtype")
    check_same("dy", dy[1], gate[1], "shape", of="gate")
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")


# ---- tensors as two levels of tokens --------------------------------------------------------------------------------


def _strides(shape, stride) -> tuple[int, int] | None:
    """Return how far apart outer and inner tokens ``[..., inner, channels]`` are.

    None unless channels are unit-stride and tokens even.
    """
    if shape[-1] > 1 and stride[-1] != 1:
        return None
    outer = row_stride((*shape[:-2], 1), (*stride[:-2], 1)) if prod(shape[:-2]) != 1 else 0
    inner = stride[-2] if len(shape) > 1 and shape[-2] != 1 else 0
    if outer is None:
        return None
    return outer, inner


def _strides_of_x(shape, stride, split: bool, swapped: bool, groups: int, cols: int) -> tuple[int, int, int] | None:
    """Return how far apart outer tokens, inner tokens and groups are in x; None unless there are such numbers.

    Args:
        shape: ``[..., inner, channels]``, the channels in two dimensions if `split`.
        stride: Of the same.
        split: See shape.
        swapped: The outer tokens are inside instead.
        groups: Of a token.
        cols: Channels of a group.
    """
    apart = cols
    if split:
        heads, size = shape[-2:]
        if heads != 1 and stride[-2] != size:
            if heads != groups:
                return None
            apart = stride[-2]
        shape, stride = (*shape[:-2], size), (*stride[:-2], stride[-1])
    found = _strides(shape, stride)
    if found is None:
        return None
    return (*found[:: -1 if swapped else 1], apart)


class Tensors:
    """The inputs of a call as kernels see them.

    Attributes:
        outer, inner, tokens: How many tokens there are, in gate's order, which y, dy and dgate
            have too, x and dx perhaps not; tokens is their product.
        groups, cols, channels: Groups of a token, channels of a group, their product.
        x: Distances between outer tokens, inner tokens and groups; None if x must be copied first.
        gate, dy: Distances between outer and inner tokens; None if the tensor must be copied first.
        out, dx: The same of y and dgate, and of dx.
        copied: Names of the inputs that must be copied first.
        vec: Elements per access, if none must.
    """

    def __init__(
        self, x: Meta, gate: Meta, weight: Meta | None, dy: Meta | None, groups: int, layout: str
    ) -> None:  # fmt: skip
        dtype, shape, stride, self.device, _ = x
        self.t = token("x", dtype)
        self.w = self.t if weight is None else token("weight", weight[0], (dtype, torch.float32))
        self.channels = channels = gate[1][-1]
        self.groups, self.cols = groups, channels // groups
        split, swapped = len(shape) == len(gate[1]) + 1, layout == "sequence_first"
        lead = gate[1][:-1]
        self.outer, self.inner = prod(lead[:-1]), lead[-1] if lead else 1
        self.tokens = self.outer * self.inner
        self.x = _strides_of_x(shape, stride, split, swapped, groups, self.cols)
        self.gate = _strides(*gate[1:3])
        self.dy = () if dy is None else _strides(*dy[1:3])
        self.out = self.inner * channels, channels
        self.dx = (channels, self.outer * channels) if swapped else self.out
        self.weight_group = 0 if weight is None or weight[1][0] == self.cols else self.cols
        self.copied = [n for n, d in (("x", self.x), ("gate", self.gate), ("dy", self.dy)) if d is None]
        if not self.copied:
            size, starts = dtype.itemsize, misaligned(x, gate, weight, dy)
            distances = (d * size for d in (*self.x, *self.gate, *self.dy))
            self.vec = WIDTH[self.t] if vector_bytes(starts, self.cols * size, *distances) == 16 else 1

    @classmethod
    def after_copies(
        cls, x: Meta, gate: Meta, weight: Meta | None, dy: Meta | None, groups: int, layout: str
    ) -> tuple[Tensors, dict[str, Any]]:
        """Return the inputs as kernels see them, and what ``Steps.converted`` says of those that are copied."""
        found = cls(x, gate, weight, dy, groups, layout)
        if not found.copied:
            return found, {}
        x, gate, dy = (
            meta._replace(stride=dense_strides(meta.shape), misaligned=0) if name in found.copied else meta
            for name, meta in (("x", x), ("gate", gate), ("dy", dy))
        )
        return cls(x, gate, weight, dy, groups, layout), dict.fromkeys(found.copied, Tensor.contiguous)

    def threads(self, chunks: int = _CHUNKS) -> int:
        """Return how many threads with `chunks` vectors each share a row that stays in registers, 0 if it does not."""
        vectors = self.cols // self.vec
        if self.vec == 1 or vectors > chunks * _THREADS or self.tokens * self.groups > _COUNT_LIMIT:
            return 0
        return group_threads(-(-vectors // chunks), _THREADS)

    def long_geometry(self) -> tuple[int, int, int]:
        """Return grid, block and threads per row of the long kernels."""
        threads = group_threads(-(-self.cols // (self.vec if self.vec > 1 else 4)), _THREADS)
        block = block_of(threads)
        return min(-(-self.tokens * self.groups // (block // threads)), GRID_LIMIT), block, threads

    def long_flags(self) -> tuple[int, int]:
        """Return weight_fp32 and aligned16 of the long kernels."""
        return int(self.w == "fp32"), int(self.vec > 1)


def _form(act: str, gate_first: bool) -> int:
    """Return the argument of kernels: how the gate acts, 0 for a sigmoid after the norm."""
    return _ACTS.index(act) + 2 * gate_first


def plan_fwd(
    x: Meta, gate: Meta, weight: Meta | None, groups: int, eps: float, layout: str, act: str, gate_first: bool,
    device: int,
) -> Steps:  # fmt: skip
    form = _form(act, gate_first)
    s, converted = Tensors.after_copies(x, gate, weight, None, groups, layout)
    numbers = s.tokens, s.inner, groups, s.cols, *s.x, *s.gate, *s.out, s.weight_group
    if threads := s.threads():
        block = block_of(threads)
        launch = _FWD.bind((s.t, s.w, _CHUNKS), device, -(-s.tokens * groups // (block // threads)), block)
        numbers += threads, divisor(groups), divisor(s.inner), form
    else:
        grid, block, threads = s.long_geometry()
        launch, numbers = _FWD_LONG.bind((s.t,), device, grid, block), (*numbers, threads, *s.long_flags(), form)
    return Steps(Step(launch, "x", "gate", "weight", "y", *numbers, eps), converted=converted)


class _Block(NamedTuple):
    """How a block of the backward is cut into rows.

    Attributes:
        form: How the threads of a row lie in warps.
        threads: Threads of a row, each with `chunks` vectors of it.
        rows: Of a block, a multiple of `unit`: so many share their warps.
    """

    chunks: int
    form: int
    threads: int
    rows: int
    unit: int

    @classmethod
    def of(cls, vectors: int, limit: int = _THREADS) -> _Block:
        """Return how rows of so many vectors keep most of `limit` threads busy, of `_THREADS` with two vectors each.

        With one vector each if that are nine of ten (1280 channels of bf16: three rows of five warps; 384 channels: ten
        rows of 48 threads, two of which share three warps), or if a row has at most four warps, and else with two.
        """
        block = cls._with(1, vectors, limit)
        idle = block.rows * vectors < 0.9 * limit
        return cls._with(_CHUNKS, vectors, _THREADS) if vectors > limit or (idle and vectors > 128) else block

    @classmethod
    def _with(cls, chunks: int, vectors: int, limit: int) -> _Block:
        needed = -(-vectors // chunks)
        threads = min(group_threads(needed, limit), limit)
        form = _LANES if threads <= 32 else _WARPS
        if chunks == 1:
            form = {64: _TWO_WARPS, 128: _FOUR_WARPS}.get(threads, form)
        unit = max(1, 32 // threads)
        rows = limit // threads // unit * unit
        whole = cls(chunks, form, threads, min(rows, 15) if threads > 32 else rows, unit)
        if chunks != 1:
            return whole
        threads = -(-needed // 4) * 4
        unit = max(1, 32 // (threads & -threads))
        rows = min(limit // threads // unit, 15) * unit  # a barrier for each unit
        return cls(chunks, _VECTORS, threads, rows, unit) if rows > 1.1 * whole.rows else whole


def plan_bwd(
    dy: Meta, x: Meta, gate: Meta, weight: Meta | None, groups: int, eps: float, layout: str, act: str,
    gate_first: bool, weight_grad: bool, device: int,
) -> Steps:  # fmt: skip
    s, converted = Tensors.after_copies(x, gate, weight, dy, groups, layout)
    near = max(*s.dy, *s.x, *s.gate, *s.out, *s.dx) < 2**30
    width = s.channels if s.weight_group else s.cols  # of dweight
    info, form = device_info(device), _form(act, gate_first)
    if near and s.threads():
        steps, scratch, overlaps = _rows_steps(s, info, eps, form, width, weight_grad)
    else:
        steps, scratch, overlaps = _long_steps(s, info, eps, form, weight_grad)
    if weight_grad:
        rows = prod(scratch["partial"].shape) // width
        steps.append(column_sum_step("partial", "dweight", rows, width, weight.dtype, device, overlaps=overlaps))
    return Steps(*steps, scratch=scratch if weight_grad else {}, converted=converted)


_TENSORS = "dy", "x", "gate", "weight", "dx", "dgate"


def _rows_steps(
    s: Tensors, info: DeviceInfo, eps: float, gate_form: int, width: int, weight_grad: bool
) -> tuple[list[Step], dict[str, Memory], bool]:
    """Return launches, scratch, and whether the sum for dweight waits while they run."""
    chunks, form, threads, rows, unit = _Block.of(s.cols // s.vec, _OTHER_THREADS if gate_form else _THREADS)
    rows = max(unit, min(rows, s.tokens * s.groups // info.sm_count // unit * unit))  # some for every block
    # All blocks run at the same time, unless one token has more groups.
    blocks = max(min(info.sm_count, -(-s.tokens * s.groups // rows)), -(-s.groups // rows))
    lanes = min(blocks * rows // s.groups, s.tokens)  # tokens at the same time
    summed = rows > s.groups or not s.weight_group  # over the block
    # Others have no registers left for a block of the sum.
    overlaps = overlaps_next(width) and chunks == 1 and form not in (_VECTORS, _WARPS) and gate_form == 0
    size = 16 // WIDTH[s.t]
    distances = (d * size for d in (*s.dy, *s.x, *s.gate, *s.out, *s.dx))
    numbers = (
        s.tokens, s.inner, s.groups, s.cols, *distances, s.weight_group, lanes, threads, divisor(s.inner),
        divisor(s.groups), int(s.w != s.t), int(overlaps), gate_form, eps,
    )  # fmt: skip
    shared = 0 if chunks == 1 else 2 * 3 * chunks * rows * threads * 16  # for the rows to come
    if summed:
        # If the first and the last of a block's tokens lack groups, these have a place all the same.
        whole = not s.weight_group or rows % s.groups == 0
        shared = max(shared, s.cols * 4 * (rows if whole else s.groups * ((rows + s.groups - 2) // s.groups + 1)))
    launch = _BWD.bind((s.t, chunks, form, gate_form == 0), s.device, blocks, rows * threads, shared)
    scratch = {"partial": Memory((blocks if summed else lanes, width), torch.float32)}
    return [Step(launch, *_TENSORS, "partial" if weight_grad else 0, *numbers)], scratch, overlaps


def _long_steps(
    s: Tensors, info: DeviceInfo, eps: float, form: int, weight_grad: bool
) -> tuple[list[Step], dict[str, Memory], bool]:
    inputs = s.tokens, s.inner, s.groups, s.cols, *s.dy, *s.x, *s.gate
    grid, block, threads = s.long_geometry()
    launch = _BWD_LONG.bind((s.t,), s.device, grid, block)
    numbers = *inputs, *s.out, *s.dx, s.weight_group, threads, *s.long_flags(), form, eps
    steps, scratch = [Step(launch, *_TENSORS, "rstd" if weight_grad else 0, *numbers)], {}
    if weight_grad:
        grid = parts_grid(info, s.tokens, s.channels, s.vec)
        launch = _BWD_WEIGHT.bind((s.t,), s.device, grid, 256)
        steps.append(Step(launch, "dy", "x", "gate", "rstd", "partial", *inputs, s.long_flags()[1], form))
        scratch["rstd"] = Memory((s.tokens * s.groups,), torch.float32)
        scratch["partial"] = Memory((grid[1], s.channels), torch.float32)
    return steps, scratch, True
