"""RMS normalisation of groups of channels times a sigmoid gate (the end of a linear attention), and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable

from rtkernels import interop
from rtkernels._arch import Target
from rtkernels._guard import needs_grad
from rtkernels._kernel import Kernel, Plans, allocator, dense_strides, device_info, shared_limit
from rtkernels._layout import (
    GRID_LIMIT,
    address,
    block_of,
    check_same,
    group_threads,
    metadata,
    nothing,
    row_stride,
    token,
    vector_bytes,
)
from rtkernels._registry import Op, TorchOp
from rtkernels.errors import ArgumentError
from rtkernels.ops.column_sum import column_sum
from rtkernels.testing.rows import Row

_UNIT = "norm/group_rms_norm_gate.cu"
_LAYOUTS = ("same", "sequence_first")
_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_CHUNKS = 2  # 16-byte pieces of each input that a thread owns
_THREADS = 512
_COUNT_LIMIT = 2**31 - 1  # the kernels that count in 32 bits take no more


def _stages(limit: int) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes (4 at most)."""
    return min(4, (limit - 2048) // (_THREADS * 16 * _CHUNKS * 3))


def _bwd_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    return ((t, w, _CHUNKS, _stages(shared_limit(target))) for t, w in _TYPES)


_LONG_VARIANTS = [(t, w, v) for t, w in _TYPES for v in (1, _WIDTH[t])]
_FWD_STRIDES = (
    "inner_size:i64 groups:i64 cols:i64 x_outer:i64 x_inner:i64 x_group:i64 gate_outer:i64 gate_inner:i64 "
    "y_outer:i64 y_inner:i64 weight_group:i64 threads_per_row:i64 eps:f64"
)
_BWD_POINTERS = "dy:ptr x:ptr gate:ptr weight:ptr dx:ptr dgate:ptr"
_COUNTS = "tokens:i64 inner_size:i64 groups:i64 cols:i64"
_BWD_INPUTS = "dy_outer:i64 dy_inner:i64 x_outer:i64 x_inner:i64 x_group:i64 gate_outer:i64 gate_inner:i64"
_FWD = Kernel(
    _UNIT,
    "group_rms_norm_gate_fwd",
    template="T W CHUNKS",
    args=f"x:ptr gate:ptr weight:ptr y:ptr {_FWD_STRIDES}",
    variants=[(t, w, _CHUNKS) for t, w in _TYPES],
    max_registers=64,
)
_FWD_LONG = Kernel(
    _UNIT,
    "group_rms_norm_gate_fwd_long",
    template="T W VEC",
    args=f"x:ptr gate:ptr weight:ptr y:ptr tokens:i64 {_FWD_STRIDES}",
    variants=_LONG_VARIANTS,
    max_registers=64,
)
_BWD = Kernel(
    _UNIT,
    "group_rms_norm_gate_bwd",
    template="T W CHUNKS STAGES",
    args=f"{_BWD_POINTERS} partial:ptr {_COUNTS} dy_outer:i64 dy_inner:i64 dy_step:i64 dy_wrap:i64 "
    "x_outer:i64 x_inner:i64 x_step:i64 x_wrap:i64 x_group:i64 "
    "gate_outer:i64 gate_inner:i64 gate_step:i64 gate_wrap:i64 "
    "dgate_outer:i64 dgate_inner:i64 dgate_step:i64 dgate_wrap:i64 "
    "dx_step:i64 inner_step:i64 weight_group:i64 groups_per_block:i64 threads_per_row:i64 eps:f64",
    variants=_bwd_variants,
    max_registers=128,
)
_BWD_LONG = Kernel(
    _UNIT,
    "group_rms_norm_gate_bwd_long",
    template="T W VEC",
    args=f"{_BWD_POINTERS} rstd:ptr {_COUNTS} {_BWD_INPUTS} dgate_outer:i64 dgate_inner:i64 weight_group:i64 "
    "threads_per_row:i64 eps:f64",
    variants=_LONG_VARIANTS,
    max_registers=64,
)
_BWD_WEIGHT = Kernel(
    _UNIT,
    "group_rms_norm_gate_bwd_weight",
    template="T VEC",
    args=f"dy:ptr x:ptr gate:ptr rstd:ptr partial:ptr {_COUNTS} {_BWD_INPUTS}",
    variants=[(t, v) for t in _WIDTH for v in (1, _WIDTH[t])],
    max_registers=64,
)


# ---- validation -----------------------------------------------------------------------------------------------------

_Meta = tuple[Any, ...]


def _check(x: _Meta, gate: _Meta, weight: _Meta | None, groups: int, layout: str) -> tuple[int, int]:
    """Raise an ArgumentError for arguments that do not fit together; return how many channels there are, in all and
    in a group."""
    dtype, shape, _, device = x
    token("x", dtype)
    if layout not in _LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; expected one of {', '.join(_LAYOUTS)}")
    split = len(shape) == len(gate[1]) + 1
    if len(shape) < 1 + split:
        raise ArgumentError("x has no dimensions; expected at least one, the last holds the channels")
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
    check_same("gate", gate[3], device, "device index")
    if groups < 1 or channels % groups:
        raise ArgumentError(f"groups is {groups}; expected a number that divides the {channels} channels")
    cols = channels // groups
    if weight is not None:
        token("weight", weight[0], (dtype, torch.float32))
        if tuple(weight[1]) not in ((channels,), (cols,)):
            raise ArgumentError(
                f"weight has shape {tuple(weight[1])}; expected ({channels},), one number for each channel, or "
                f"({cols},), shared by the groups"
            )
        check_same("weight", weight[3], device, "device index")
    return channels, cols


def _check_bwd(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, layout: str, wanted: bool):
    counts = _check(metadata(x), metadata(gate), metadata(weight), groups, layout)
    check_same("dy", dy.dtype, x.dtype, "dtype")
    check_same("dy", dy.shape, gate.shape, "shape", of="gate")
    check_same("dy", dy.get_device(), x.get_device(), "device index")
    if wanted and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")
    return counts


# ---- tensors as two levels of tokens --------------------------------------------------------------------------------


def _sizes(lead: tuple[int, ...]) -> tuple[int, int]:
    """Return how many outer and inner tokens x has."""
    return prod(lead[:-1]), lead[-1] if lead else 1


def _strides(shape, stride, swapped: bool) -> tuple[int, int] | None:
    """Return how far apart outer and inner tokens are; None unless there are two such numbers.

    Args:
        shape: Of a tensor with one dimension of channels, the last.
        stride: Of the same.
        swapped: The last dimension of tokens is the outer one.
    """
    if shape[-1] > 1 and stride[-1] != 1:
        return None
    outer = row_stride((*shape[:-2], 1), (*stride[:-2], 1)) if prod(shape[:-2]) != 1 else 0
    inner = stride[-2] if len(shape) > 1 and shape[-2] != 1 else 0
    if outer is None:
        return None
    return (inner, outer) if swapped else (outer, inner)


def _strides_of_x(x: _Meta, split: bool, groups: int, cols: int) -> tuple[int, int, int] | None:
    """Return how far apart outer tokens, inner tokens and groups are in x; None unless there are such numbers."""
    _, shape, stride, _ = x
    apart = cols
    if split:
        heads, size = shape[-2:]
        if heads != 1 and stride[-2] != size:
            if heads != groups:
                return None
            apart = stride[-2]
        if size == 1 and heads > 1:
            # One channel per head: they are the channels.
            shape, stride = shape[:-1], (*stride[:-2], 1)
        else:
            shape, stride = (*shape[:-2], size), (*stride[:-2], stride[-1])
    found = _strides(shape, stride, False)
    return found if found is None else (*found, apart)


class _Tensors:
    """What all plans work out first: sizes, strides and the width of accesses. `fits` is False if any input must be
    copied."""

    def __init__(self, x: _Meta, gate: _Meta, weight: _Meta | None, dy: _Meta | None, groups, layout, align) -> None:
        self.dtype, shape, _, self.device = x
        self.t = token("x", self.dtype)
        self.w = self.t if weight is None else token("weight", weight[0], (self.dtype, torch.float32))
        self.channels = gate[1][-1]
        self.groups, self.cols = groups, self.channels // groups
        split = len(shape) == len(gate[1]) + 1
        swapped = layout == "sequence_first"
        self.outer, self.inner = _sizes(tuple(shape[: -2 if split else -1]))
        self.tokens = self.outer * self.inner
        self.x = _strides_of_x(x, split, groups, self.cols)
        self.gate = _strides(gate[1], gate[2], swapped)
        self.dy = None if dy is None else _strides(dy[1], dy[2], swapped)
        dense = (self.channels, self.outer * self.channels)
        self.out = dense if swapped else (self.inner * self.channels, self.channels)  # y and dgate
        self.weight_group = 0 if weight is None or weight[1][0] == self.cols else self.cols
        self.fits = self.x is not None and self.gate is not None and (dy is None or self.dy is not None)
        if weight is not None and self.cols > 1 and weight[2] != (1,):
            self.fits = False
        if self.fits:
            size = self.dtype.itemsize
            distances = (*self.x, *self.gate, *(self.dy or ()))
            wide = vector_bytes(align, self.cols * size, *(d * size for d in distances)) == 16
            self.vec = _WIDTH[self.t] if wide else 1

    @property
    def threads(self) -> int:
        """How many threads share a row that stays in registers, 0 if it does not."""
        vectors = self.cols // self.vec
        if self.vec == 1 or vectors > _CHUNKS * _THREADS or self.tokens * self.groups > _COUNT_LIMIT:
            return 0
        return group_threads(-(-vectors // _CHUNKS), _THREADS)

    def long_geometry(self) -> tuple[int, int, int]:
        """Return grid, block and threads per row of the long kernels."""
        threads = group_threads(-(-self.cols // (self.vec if self.vec > 1 else 4)), 1024)
        block = block_of(threads)
        return min(-(-self.tokens * self.groups // (block // threads)), GRID_LIMIT), block, threads


def _fitted(t: Tensor, strides: Any) -> Tensor:
    return t.contiguous() if strides is None else t


def _copied(tensors: _Tensors, x: Tensor, gate: Tensor, weight: Tensor | None) -> tuple[Any, ...]:
    """Return the inputs of a call, those copied that no kernel takes as they are."""
    weight = weight if weight is None else weight.contiguous()
    return _fitted(x, tensors.x), _fitted(gate, tensors.gate), weight


# ---- plans ----------------------------------------------------------------------------------------------------------


def _plan_fwd(x: _Meta, gate: _Meta, weight: _Meta | None, groups: int, layout: str, align: int):
    """Return ``(launch, numbers, allocator and layout of y)``, or the _Tensors if an input must be copied first."""
    _check(x, gate, weight, groups, layout)
    memory = allocator(x[3]), (gate[1], dense_strides(gate[1]), x[0])
    if 0 in gate[1]:
        return None, (), *memory
    s = _Tensors(x, gate, weight, None, groups, layout, align)
    if not s.fits:
        return s
    outer, inner, strides = s.outer, s.inner, [s.x[:2], s.gate, s.out]
    if all(o == inner * i for o, i in strides) or outer == 1:
        outer, inner = 1, outer * inner
    elif outer > inner:  # the grid has room for few outer tokens only
        outer, inner, strides = inner, outer, [(i, o) for o, i in strides]
    x_strides, *others = strides
    numbers = (inner, groups, s.cols, *x_strides, s.x[2], *others[0], *others[1], s.weight_group)
    threads = s.threads
    if threads and outer <= 65535:
        block = block_of(threads)
        grid = (-(-inner * groups // (block // threads)), outer)
        return _FWD.bind((s.t, s.w, _CHUNKS), s.device, grid, block), (*numbers, threads), *memory
    grid, block, threads = s.long_geometry()
    return _FWD_LONG.bind((s.t, s.w, s.vec), s.device, grid, block), (s.tokens, *numbers, threads), *memory


_FWD_PLANS = Plans(_plan_fwd)


class _BackwardPlan:
    """The launches of one backward call and the workspace they need; `copy` if an input must be copied first."""

    def __init__(self, dy: _Meta, x: _Meta, gate: _Meta, weight: _Meta | None, groups, layout, align, wanted) -> None:
        s = _Tensors(x, gate, weight, dy, groups, layout, align)
        self.copy = None if s.fits else s
        if not s.fits:
            return
        self.wanted, self.weight_launch = wanted, None
        self.width = s.channels if s.weight_group else s.cols  # of dweight
        self.rows = s.tokens * groups
        info = device_info(s.device)
        counts = (s.tokens, s.inner, groups, s.cols)
        if s.threads:
            self._plan_ring(s, counts, info)
            return
        inputs = (*s.dy, *s.x, *s.gate)
        grid, block, threads = s.long_geometry()
        self.launch = _BWD_LONG.bind((s.t, s.w, s.vec), s.device, grid, block)
        self.numbers = (*counts, *inputs, *s.out, s.weight_group, threads)
        if wanted:
            column_blocks = -(-s.channels // (256 * s.vec))
            parts = min(max(1, 4 * info.sm_count // column_blocks), s.tokens, 65535)
            self.partial = (parts, s.channels)
            self.weight_launch = _BWD_WEIGHT.bind((s.t, s.vec), s.device, (column_blocks, parts), 256)
            self.weight_numbers = (*counts, *inputs)

    def _plan_ring(self, s: _Tensors, counts: tuple[int, ...], info: Any) -> None:
        threads, stages = s.threads, _stages(info.shared_per_block)
        most = _THREADS // threads if threads <= 32 else min(_THREADS // threads, 15)  # rows at once
        slices = -(-s.groups // most)
        slice_groups = -(-s.groups // slices)
        lanes = max(1, min(most // slice_groups, s.tokens // info.sm_count))
        units = lanes * slice_groups
        units += -units % (32 // min(threads, 32))  # whole warps
        blocks = min(max(1, info.sm_count // slices), -(-s.tokens // lanes))
        self.partial = (blocks, s.channels) if s.weight_group else (blocks * slices, s.cols)
        step = blocks * lanes
        walks = []
        for outer, inner in (s.dy, s.x[:2], s.gate, s.out):
            walks.append((outer, inner, step // s.inner * outer + step % s.inner * inner, outer - s.inner * inner))
        self.numbers = (
            *counts, *walks[0], *walks[1], s.x[2], *walks[2], *walks[3],
            step * s.channels, step % s.inner, s.weight_group, slice_groups, threads,
        )  # fmt: skip
        block = units * threads
        shared = stages * block * 16 * _CHUNKS * 3
        self.launch = _BWD.bind((s.t, s.w, _CHUNKS, stages), s.device, (blocks, slices), block, shared)

    def run(self, dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float):
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
        inputs = (dy.data_ptr(), x.data_ptr(), gate.data_ptr())
        pointers = (*inputs, address(weight), dx.data_ptr(), dgate.data_ptr())
        if not self.wanted:
            self.launch(*pointers, 0, *self.numbers, eps)
            return dx, dgate, nothing(x)
        partial = torch.empty(self.partial, dtype=torch.float32, device=x.device)
        if self.weight_launch is None:
            self.launch(*pointers, partial.data_ptr(), *self.numbers, eps)
        else:
            rstd = torch.empty(self.rows, dtype=torch.float32, device=x.device)
            self.launch(*pointers, rstd.data_ptr(), *self.numbers, eps)
            self.weight_launch(*inputs, rstd.data_ptr(), partial.data_ptr(), *self.weight_numbers)
        return dx, dgate, column_sum(partial.view(-1, self.width), weight.dtype)


_BWD_PLANS = Plans(_BackwardPlan)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str) -> Tensor:
    x_address, gate_address, weight_address = x.data_ptr(), gate.data_ptr(), address(weight)
    align = (x_address | gate_address | weight_address) & 15
    plan = _FWD_PLANS[metadata(x), metadata(gate), metadata(weight), groups, layout, align]
    if plan.__class__ is _Tensors:
        return _launch_fwd(*_copied(plan, x, gate, weight), groups, eps, layout)
    launch, numbers, allocate, y_layout = plan
    y = allocate(*y_layout)
    if launch is not None:
        launch(x_address, gate_address, weight_address, y.data_ptr(), *numbers, eps)
    return y


def _launch_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str, weight_grad: bool
):
    _check_bwd(dy, x, gate, weight, groups, layout, weight_grad)
    if gate.numel() == 0:
        return x.new_empty(x.shape), gate.new_empty(gate.shape), _no_rows(x, weight, weight_grad)
    align = (dy.data_ptr() | x.data_ptr() | gate.data_ptr() | address(weight)) & 15
    key = (metadata(dy), metadata(x), metadata(gate), metadata(weight), groups, layout, align, weight_grad)
    plan = _BWD_PLANS[key]
    if plan.copy is not None:
        copies = (_fitted(dy, plan.copy.dy), *_copied(plan.copy, x, gate, weight))
        return _launch_bwd(*copies, groups, eps, layout, weight_grad)
    return plan.run(dy, x, gate, weight, eps)


def _no_rows(x: Tensor, weight: Tensor | None, weight_grad: bool) -> Tensor:
    return weight.new_zeros(weight.shape) if weight_grad else nothing(x)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _grouped(t: Tensor, groups: int, cols: int, lead: int, swap: bool) -> Tensor:
    """Return a tensor as fp32 (or wider) [tokens..., groups, cols], its first two dimensions swapped if asked for."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    wide = wide.reshape(*t.shape[:lead], groups, cols)
    return wide.transpose(0, 1) if swap else wide


def _wide_inputs(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, layout: str, *more: Tensor):
    """Return x, gate, weight and tensors like gate as [tokens..., groups, cols], all in the layout of x."""
    lead, channels = gate.dim() - 1, gate.shape[-1]
    cols, swap = channels // groups, layout == "sequence_first"
    w = torch.ones((), device=x.device)
    if weight is not None:
        w = weight.to(torch.promote_types(weight.dtype, torch.float32)).view(-1, cols)
    return (
        _grouped(x, groups, cols, lead, False),
        _grouped(gate, groups, cols, lead, swap),
        w,
        *(_grouped(t, groups, cols, lead, swap) for t in more),
    )


def _as_gate(t: Tensor, gate: Tensor, layout: str) -> Tensor:
    return (t.transpose(0, 1) if layout == "sequence_first" else t).reshape(gate.shape).to(gate.dtype).contiguous()


def _torch_fwd(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float = 1e-6, layout: str = "same"
) -> Tensor:
    v, t, w = _wide_inputs(x, gate, weight, groups, layout)
    normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return _as_gate(normed * w * torch.sigmoid(t), gate, layout)


def _torch_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float = 1e-6, layout: str = "same"
) -> tuple[Tensor, Tensor, Tensor]:
    v, t, w, d = _wide_inputs(x, gate, weight, groups, layout, dy)
    s = torch.sigmoid(t)
    rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    a, n = d * w * s, v * rstd
    dx = rstd * a - v * rstd**3 * (a * v).mean(-1, keepdim=True)
    dgate = n * a * torch.sigmoid(-t)
    dweight = nothing(x)
    if weight is not None:
        dweight = (d * s * n).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype).contiguous(), _as_gate(dgate, gate, layout), dweight


def _reference_fwd(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str) -> Tensor:
    _check(metadata(x), metadata(gate), metadata(weight), groups, layout)
    return _torch_fwd(x, gate, weight, groups, eps, layout) if gate.numel() else gate.new_empty(gate.shape)


def _reference_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str, weight_grad: bool
):
    _check_bwd(dy, x, gate, weight, groups, layout, weight_grad)
    if gate.numel() == 0:
        return x.new_empty(x.shape), gate.new_empty(gate.shape), _no_rows(x, weight, weight_grad)
    dx, dgate, dweight = _torch_bwd(dy, x, gate, weight, groups, eps, layout)
    return dx, dgate, dweight if weight_grad else nothing(x)


def _fake_fwd(x, gate, weight, groups, eps, layout):
    return gate.new_empty(gate.shape)


def _fake_bwd(dy, x, gate, weight, groups, eps, layout, weight_grad):
    dweight = weight.new_empty(weight.shape) if weight_grad else nothing(x)
    return x.new_empty(x.shape), gate.new_empty(gate.shape), dweight


FORWARD = TorchOp(
    "group_rms_norm_gate_fwd(Tensor x, Tensor gate, Tensor? weight, int groups, float eps, str layout) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "group_rms_norm_gate_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, int groups, float eps, str layout, "
    "bool weight_grad) -> (Tensor, Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


class _GroupRmsNormGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps, layout):
        ctx.set_materialize_grads(False)
        ctx.options = groups, eps, layout
        ctx.save_for_backward(x, gate, weight)
        return FORWARD(x, gate, weight, groups, eps, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[:3]
        if dy is None:
            return (None,) * 6
        grads = BACKWARD(dy, *ctx.saved_tensors, *ctx.options, wanted[2])
        return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None, None


def group_rms_norm_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-6,
    layout: str = "same",
) -> Tensor:
    """Normalise each group of channels by its root mean square and gate the result.

    ``y = x / sqrt(mean over the group of x^2 + eps) * weight * sigmoid(gate)``. Computed in fp32 and rounded once.
    Differentiable once in x, gate and weight.

    Args:
        x: ``[..., channels]``, or ``[..., heads, head_dim]`` with as many channels in all; bfloat16, float16 or
            float32. Any strides, also those of a transposed ``[batch, heads, sequence, head_dim]`` if there are as
            many groups as heads (a copy is made unless channels are unit-stride and tokens evenly spaced in two
            levels). May be any object with ``__dlpack__``; the result is then of its kind.
        gate: One number for each channel, of x's dtype: ``[..., channels]`` with the leading dimensions of x in
            the order that `layout` says; its strides may differ.
        weight: ``[channels]``, or ``[channels / groups]`` shared by the groups, of x's dtype or float32; None for ones.
        groups: How many groups of neighbouring channels there are; any divisor of channels.
        eps: Added to the mean square.
        layout: ``"same"``, or ``"sequence_first"``: x is ``[batch, sequence, ...]``, gate and the result are
            ``[sequence, batch, channels]``.

    Returns:
        ``y``, dense, of gate's shape and x's dtype.
    """
    if not isinstance(x, Tensor):
        return interop.call(group_rms_norm_gate, x, gate, weight, groups=groups, eps=eps, layout=layout)
    if is_grad_enabled() and needs_grad(x, gate, weight):
        return _GroupRmsNormGate.apply(x, gate, weight, groups, eps, layout)
    return FORWARD(x, gate, weight, groups, eps, layout)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    gate, weight = x.flip(-1) * 2, torch.randn(48, generator=g, device=device)
    turned = gate.transpose(0, 1).contiguous()
    yield FORWARD, (x, gate, weight, 3, 1e-6, "same")
    yield FORWARD, (x.bfloat16().view(3, 5, 6, 8), turned.bfloat16(), weight[:16], 3, 1e-6, "sequence_first")
    yield BACKWARD, (gate * 3, x, gate, weight, 3, 1e-6, "same", True)
    yield BACKWARD, (turned * 3, x, turned, weight[:24], 2, 1e-6, "sequence_first", True)
    yield BACKWARD, (gate * 3, x, gate, None, 1, 1e-6, "same", False)


def _rows() -> Iterator[Row]:
    for batch, sequence, channels, groups in ((2, 4096, 2048, 4), (1, 4096, 4096, 4), (2, 4096, 2048, 16)):
        n = batch * sequence * channels * 2  # bytes of x
        names = {"groups": groups, "eps": 1e-6, "layout": "sequence_first"}

        def make(
            device: str, generator: torch.Generator, *, backward: bool, sizes=(batch, sequence, channels), names=names
        ) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            b, s, c = sizes
            inputs = {"x": normal(b, s, c), "gate": normal(s, b, c), "weight": normal(c), **names}
            return {"dy": normal(s, b, c), **inputs} if backward else inputs

        shape = f"b{batch}s{sequence}c{channels}g{groups}"
        yield Row(
            name="gate_fwd",
            shape=shape,
            make=lambda device, g, make=make: make(device, g, backward=False),
            ours=FORWARD,
            torch=_torch_fwd,
            bytes=3 * n + 2 * channels,
        )
        yield Row(
            name="gate_bwd",
            shape=shape,
            make=lambda device, g, make=make: make(device, g, backward=True),
            ours=lambda dy, x, gate, weight, groups, eps, layout: BACKWARD(
                dy, x, gate, weight, groups, eps, layout, True
            ),
            torch=_torch_bwd,
            bytes=5 * n + 4 * channels,
        )


OP = Op(
    "group_rms_norm_gate",
    public=("group_rms_norm_gate",),
    kernels=(_FWD, _FWD_LONG, _BWD, _BWD_LONG, _BWD_WEIGHT),
    torch_ops=(FORWARD, BACKWARD),
    samples=_samples,
    rows=_rows,
)
