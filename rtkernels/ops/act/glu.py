"""Gated linear units, ``act(gate) * up``, with an optional weight per row, and their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_reference import halves, partner_and_slope, value_and_slope
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    address,
    block_of,
    check_same,
    group_threads,
    is_dense,
    may_overlap,
    metadata,
    nothing,
    row_count,
    row_stride,
    rowed,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.autograd import detached, may_overwrite, needs_grad, once_differentiable, overwrite_once
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp
from rtkernels.runtime.operator.plan import DensePlan
from rtkernels.runtime.operator.registry import Op

_UNIT, _GENERIC_UNIT = "act/glu.cu", "act/glu_generic.cu"
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
ACT_TYPES = {
    "silu": "Silu",
    "gelu_tanh": "GeluTanh",
    "gelu_erf": "GeluErf",
    "relu": "Relu",
    "relu2": "Relu2",
    "sigmoid": "Sigmoid",
    "none": "Identity",
    "swiglu_oai": "SwigluOai",
}
_THREADS = 256
# Vectors a thread has in flight of each input. The elementwise backward needs only one: there are three inputs, and
# every thread slot of an SM is filled.
_FWD_ROWS = 2
_BWD_ROWS = 1
_BWD_CHUNKS = 2
_GENERIC_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # common/any_type.cuh
_GENERIC_ELEMENTS = 4  # a thread has in flight of each input
_STRIP = 31  # lane_bits of a block that works on one row


def _variants(in_flight: int) -> list[tuple[Any, ...]]:
    return [(t, act, _WIDTH[t], in_flight) for t in _WIDTH for act in ACT_TYPES.values()]


_BWD_DIMS = "rows:i64 cols:i64 dy_stride:i64 gate_stride:i64 up_stride:i64 out_stride:i64 weight_wide:i64"
_FWD = Kernel(
    _UNIT,
    "glu_fwd",
    template="T Act VEC ROWS",
    args="gate:ptr up:ptr weight:ptr y:ptr rows:i64 cols:i64 gate_stride:i64 up_stride:i64 weight_wide:i64 "
    "lane_bits:i64",
    variants=_variants(_FWD_ROWS),
    max_registers=40,
)
_BWD = Kernel(
    _UNIT,
    "glu_bwd",
    template="T Act VEC ROWS",
    args=f"dy:ptr gate:ptr up:ptr weight:ptr dgate:ptr dup:ptr {_BWD_DIMS} lane_bits:i64",
    variants=_variants(_BWD_ROWS),
    max_registers=40,
)
_BWD_BY_ROW = Kernel(
    _UNIT,
    "glu_bwd_rows",
    template="T Act VEC CHUNKS",
    args=f"dy:ptr gate:ptr up:ptr weight:ptr dgate:ptr dup:ptr dweight:ptr {_BWD_DIMS} threads_per_row:i64",
    variants=_variants(_BWD_CHUNKS),
    max_registers=76,
)
# For rows that can only be accessed an element at a time.
_FWD_GENERIC = Kernel(
    _GENERIC_UNIT,
    "glu_fwd_generic",
    template="THREADS",
    args="gate:ptr up:ptr weight:ptr y:ptr rows:i64 cols:i64 gate_stride:i64 up_stride:i64 weight_wide:i64 "
    "threads_per_row:i64 type:i64 act:i64",
    variants=[(_THREADS,)],
    max_registers=64,
)
_BWD_GENERIC = Kernel(
    _GENERIC_UNIT,
    "glu_bwd_generic",
    template="THREADS",
    args=f"dy:ptr gate:ptr up:ptr weight:ptr dgate:ptr dup:ptr dweight:ptr {_BWD_DIMS} threads_per_row:i64 type:i64 "
    "act:i64",
    variants=[(_THREADS,)],
    max_registers=64,
)


# ---- validation and planning: plain metadata in, a bound launch out -------------------------------------------------

_Meta = tuple[Any, ...]


def check_inputs(x: _Meta, up: _Meta | None, weight: _Meta | None, act: str) -> tuple[int, ...]:
    """Raise an ArgumentError for arguments that do not fit together; return the shape of the result."""
    dtype, shape, _, device = x
    if act not in ACT_TYPES:
        raise ArgumentError(f"act is {act!r}; expected one of {', '.join(ACT_TYPES)}")
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last holds gate (and up)")
    if up is None:
        if shape[-1] % 2:
            raise ArgumentError(f"x has an odd last dimension, {shape[-1]}; expected gate and up of equal size, or up=")
        shape = (*shape[:-1], shape[-1] // 2)
    else:
        check_same("up", up[0], dtype, "dtype")
        check_same("up", up[1], shape, "shape")
        check_same("up", up[3], device, "device index")
    if weight is not None:
        token("weight", weight[0], (dtype, torch.float32))
        if tuple(weight[1]) != tuple(shape[:-1]):
            raise ArgumentError(
                f"weight has shape {tuple(weight[1])}; expected {tuple(shape[:-1])}, one number for each row of x"
            )
        check_same("weight", weight[3], device, "device index")
    return tuple(shape)


def is_wide(weight: _Meta | None) -> bool:
    return weight is not None and weight[0] == torch.float32


def _tile(rows: int, vectors: int, rows_per_thread: int) -> tuple[tuple[int, int, int], int, int]:
    """Return grid, block and lane_bits (see Tile in act/glu.cu) that cover rows of `vectors` accesses each."""
    strips = -(-vectors // _THREADS)
    lanes = group_threads(-(-vectors // strips), _THREADS)
    block, bits, rows_at_once = lanes, _STRIP, 1
    if lanes <= 32:
        block, bits, rows_at_once = _THREADS, lanes.bit_length() - 1, _THREADS // lanes
    row_blocks = -(-rows // (rows_at_once * rows_per_thread))
    depth = -(-row_blocks // 65535)
    return (strips, -(-row_blocks // depth), depth), block, bits


def _rows_of_threads(rows: int, cols: int, per_thread: int) -> tuple[tuple[int, int], int, int]:
    """Return grid, block and threads per row of kernels in which a group of threads works on a row."""
    threads = group_threads(-(-cols // per_thread), _THREADS)
    block = block_of(threads)
    row_blocks = -(-rows // (block // threads))
    depth = -(-row_blocks // GRID_LIMIT)
    return (-(-row_blocks // depth), depth), block, threads


def _generic_types(t: str, act: str) -> tuple[int, int]:
    """Return the type and the activation as the kernels for rows of any alignment take them."""
    return _GENERIC_TYPES[t], list(ACT_TYPES).index(act)


class _ForwardPlan(DensePlan):
    __slots__ = ()

    def run(self, x: int, up: int, weight: int) -> Tensor:
        y = self.allocate(*self.layout)
        if self.launch is not None:
            self.launch(x, up, weight, y.data_ptr())
        return y


def _plan_fwd(x: _Meta, up: _Meta | None, weight: _Meta | None, act: str, align: int) -> _ForwardPlan | None:
    shape = check_inputs(x, up, weight, act)
    dtype, device = x[0], x[3]
    rows, cols = row_count(shape), shape[-1]
    memory = dense_memory(device, shape, dtype)
    if rows == 0 or cols == 0:
        return _ForwardPlan(None, *memory)
    gate_stride = row_stride(x[1], x[2])
    up_stride = gate_stride if up is None else row_stride(up[1], up[2])
    if gate_stride is None or up_stride is None or not is_dense(weight):
        return None
    t, size = token("x", dtype), dtype.itemsize
    ending = (rows, cols, gate_stride, up_stride, int(is_wide(weight)))
    if vector_bytes(align, cols * size, gate_stride * size, up_stride * size) < 16:
        grid, block, threads = _rows_of_threads(rows, cols, _GENERIC_ELEMENTS)
        ending += threads, *_generic_types(t, act)
        return _ForwardPlan(_FWD_GENERIC.bind((_THREADS,), device, grid, block, ending=ending), *memory)
    variant = t, ACT_TYPES[act], _WIDTH[t], _FWD_ROWS
    grid, block, lane_bits = _tile(rows, cols // _WIDTH[t], _FWD_ROWS)
    return _ForwardPlan(_FWD.bind(variant, device, grid, block, ending=(*ending, lane_bits)), *memory)


_FWD_PLANS = Plans(_plan_fwd)


def _plan_bwd(
    dy: _Meta, x: _Meta, up: _Meta | None, weight: _Meta | None, act: str, align: int, weight_grad: bool
) -> tuple[Any, bool, tuple[int, ...]]:
    """Return the launch, whether its kernel takes dweight, and the numbers it ends with. All inputs are rowed."""
    dtype, device = x[0], x[3]
    t, size, rows, cols = token("x", dtype), dtype.itemsize, row_count(x[1]), dy[1][-1]
    strides = [row_stride(m[1], m[2]) for m in (dy, x, x if up is None else up)]
    vec = _WIDTH[t]
    dims = (rows, cols, *strides, x[1][-1], int(is_wide(weight)))
    if vector_bytes(align, cols * size, *(s * size for s in strides)) < 16:
        grid, block, threads = _rows_of_threads(rows, cols, _GENERIC_ELEMENTS)
        return _BWD_GENERIC.bind((_THREADS,), device, grid, block), True, (*dims, threads, *_generic_types(t, act))
    if not weight_grad:
        grid, block, lane_bits = _tile(rows, cols // vec, _BWD_ROWS)
        launch = _BWD.bind((t, ACT_TYPES[act], vec, _BWD_ROWS), device, grid, block)
        return launch, False, (*dims, lane_bits)
    grid, block, threads = _rows_of_threads(rows, cols, vec * _BWD_CHUNKS)
    launch = _BWD_BY_ROW.bind((t, ACT_TYPES[act], vec, _BWD_CHUNKS), device, grid, block)
    return launch, True, (*dims, threads)


_BWD_PLANS = Plans(_plan_bwd)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _planned_fwd(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str) -> _ForwardPlan | None:
    return _FWD_PLANS[metadata(x), metadata(up), metadata(weight), act, (x.data_ptr() | address(up)) & 15]


def _copied(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str) -> tuple[Any, ...]:
    return rowed(x), rowed(up), weight if weight is None else weight.contiguous(), act


def _launch_bwd(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool):
    _check_bwd(dy, x, up, weight, act, weight_grad)
    dgate = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _run_bwd(dy, x, up, weight, act, weight_grad, dgate, nothing(x) if up is None else torch.empty_like(dgate))


def _launch_bwd_over(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool):
    _check_bwd(dy, x, up, weight, act, weight_grad)
    _check_over(dy, x, up, weight)
    return _run_bwd(dy, x, up, weight, act, weight_grad, x, nothing(x) if up is None else up)[2]


def _run_bwd(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    act: str,
    weight_grad: bool,
    dgate: Tensor,
    dup: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the gradients to dgate and dup, which may be x and up: each thread writes what it has read itself."""
    if dy.numel() == 0:
        return dgate, dup, torch.zeros_like(weight) if weight_grad else nothing(x)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if weight_grad else nothing(x)
    dy, x, up = rowed(dy), rowed(x), rowed(up)
    weight = weight if weight is None else weight.contiguous()
    align = (dy.data_ptr() | x.data_ptr() | address(up)) & 15
    plan = _BWD_PLANS[metadata(dy), metadata(x), metadata(up), metadata(weight), act, align, weight_grad]
    launch, by_row, dims = plan
    pointers = (dy.data_ptr(), x.data_ptr(), address(up), address(weight), dgate.data_ptr())
    dup_address = 0 if up is None else dup.data_ptr()
    if by_row:
        launch(*pointers, dup_address, dweight.data_ptr() if weight_grad else 0, *dims)
    else:
        launch(*pointers, dup_address, *dims)
    return dgate, dup, dweight


def _check_bwd(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool) -> None:
    shape = check_inputs(metadata(x), metadata(up), metadata(weight), act)
    check_same("dy", dy.dtype, x.dtype, "dtype")
    check_same("dy", tuple(dy.shape), shape, "shape", of="the result")
    check_same("dy", dy.get_device(), x.get_device(), "device index")
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")


def _check_over(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None) -> None:
    for name, t, others in (("x", x, (dy, up, weight)), ("up", up, (dy, weight))):
        if t is None:
            continue
        if not t.is_contiguous():
            raise ArgumentError(f"{name} has strides {t.stride()}; expected a dense tensor to write the gradient over")
        if any(other is not None and may_overlap(t, other) for other in others):
            raise ArgumentError(f"{name} shares memory with another input; expected its own to write the gradient over")


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str) -> Tensor:
    check_inputs(metadata(x), metadata(up), metadata(weight), act)
    gate, up = halves(x, up)
    y = value_and_slope(act, gate)[0] * partner_and_slope(act, up)[0]
    if weight is not None:
        y = y * weight.float().unsqueeze(-1)
    return y.to(x.dtype).contiguous()


def _reference_bwd(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool):
    _check_bwd(dy, x, up, weight, act, weight_grad)
    gate, upf = halves(x, up)
    value, slope = value_and_slope(act, gate)
    other, other_slope = partner_and_slope(act, upf)
    g = dy.float()
    dweight = (g * value * other).sum(-1).to(weight.dtype).contiguous() if weight_grad else nothing(x)
    if weight is not None:
        g = g * weight.float().unsqueeze(-1)
    dgate, dup = (g * other * slope).to(x.dtype), (g * value * other_slope).to(x.dtype)
    if up is None:
        return torch.cat((dgate, dup), -1).contiguous(), nothing(x), dweight
    return dgate.contiguous(), dup.contiguous(), dweight


def _reference_bwd_over(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool):
    _check_bwd(dy, x, up, weight, act, weight_grad)
    _check_over(dy, x, up, weight)
    dgate, dup, dweight = _reference_bwd(dy, x, up, weight, act, weight_grad)
    x.copy_(dgate)
    if up is not None:
        up.copy_(dup)
    return dweight


def _fake_bwd_over(dy, x, up, weight, act, weight_grad):
    return weight.new_empty(weight.shape) if weight_grad else nothing(x)


def _fake_fwd(x, up, weight, act):
    return x.new_empty(x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2))


def _fake_bwd(dy, x, up, weight, act, weight_grad):
    dgate = x.new_empty(x.shape)
    dup = nothing(x) if up is None else x.new_empty(x.shape)
    return dgate, dup, weight.new_empty(weight.shape) if weight_grad else nothing(x)


FORWARD = TorchOp(
    "glu_fwd(Tensor x, Tensor? up, Tensor? weight, str act) -> Tensor",
    plan=_planned_fwd,
    copied=_copied,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "glu_bwd(Tensor dy, Tensor x, Tensor? up, Tensor? weight, str act, bool weight_grad) -> (Tensor, Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
# Writes the gradients of x and up over them; the result is that of the weight, or empty.
BACKWARD_OVER = MutatingOp(
    "glu_bwd_over(Tensor dy, Tensor(a!) x, Tensor(b!)? up, Tensor? weight, str act, bool weight_grad) -> Tensor",
    launch=_launch_bwd_over,
    reference=_reference_bwd_over,
    fake=_fake_bwd_over,
)


_again, _forward = FORWARD.again, FORWARD.call


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, weight, act, overwrites):
        ctx.set_materialize_grads(False)
        ctx.act, ctx.overwrites = act, overwrites
        ctx.save_for_backward(x, up, weight)
        return FORWARD(x, up, weight, act)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None
        if ctx.overwrites:
            overwrite_once(ctx, "glu", (dy,))
        x, up, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if ctx.overwrites and not may_overlap(dy, x) and (up is None or not may_overlap(dy, up)):
            dx, dup = detached(x, up)
            dweight = BACKWARD_OVER(dy, dx, dup, weight, ctx.act, wanted[2])
        else:
            dx, dup, dweight = BACKWARD(dy, x, up, weight, ctx.act, wanted[2])
        return dx if wanted[0] else None, dup if wanted[1] else None, dweight if wanted[2] else None, None, None


def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: str = "silu",
    weight: Tensor | None = None,
    reuse: str | None = None,
) -> Tensor:
    """Multiply the activation of a gate with another tensor: ``y = act(gate) * up * weight``.

    Computed in fp32 and rounded once. Differentiable once in x, up and weight.

    Args:
        x: ``[..., 2 * d]``, gate in the first half of the last dimension and up in the second; with `up`,
            ``[..., d]``, the gate. bfloat16, float16 or float32; any strides (a copy is made unless rows are
            unit-stride and evenly spaced). May be any object with ``__dlpack__``; the result is then of its kind.
        up: ``[..., d]``, same shape and dtype as x; its strides may differ.
        act: ``"silu"`` (SwiGLU), ``"gelu_tanh"``, ``"gelu_erf"`` (GeGLU), ``"relu"``, ``"relu2"`` (relu squared),
            ``"sigmoid"``, ``"none"``, or ``"swiglu_oai"``, what GPT-OSS models use:
            ``g * sigmoid(1.702 * g) * (u + 1)`` with g the gate cut at 7 and u up cut at -7 and 7 (their weights give
            gate and up in alternating columns; here they are halves, or separate tensors).
        weight: ``x.shape[:-1]``, one factor per row, of x's dtype or float32; None for ones.
        reuse: ``"inputs"``: the backward pass writes the gradients of x and up over x and up, which then hold them,
            instead of taking new memory. For tensors that nothing else needs by then, as the result of a projection.
            See below.

    Returns:
        ``[..., d]``, dense, of x's dtype.

    With reuse, x and up must be dense results of operations: leaves that require grad and views of them are refused. If
    another operation has saved one of them and is differentiated later, torch raises its error about an in-place
    modification; a second backward pass (``retain_graph=True``) and ``create_graph=True`` raise as well. Under
    ``torch.compile``, in a region of ``torch.utils.checkpoint`` or with other hooks for saved tensors, and where x or
    up needs no gradient, reuse changes nothing. ``docs/memory.md`` has all rules.
    """
    if not isinstance(x, Tensor):
        return interop.call(glu, x, up, act=act, weight=weight, reuse=reuse)
    overwrites = reuse is not None and may_overwrite(reuse, {"x": x, "up": up}, (weight,))
    y = _again(x, up, weight, act)
    if y is not None:
        return y
    if is_grad_enabled() and needs_grad(x, up, weight):
        return _Glu.apply(x, up, weight, act, overwrites)
    return _forward(x, up, weight, act)


OP = Op(
    "glu",
    public=("glu",),
    kernels=(_FWD, _BWD, _BWD_BY_ROW, _FWD_GENERIC, _BWD_GENERIC),
    torch_ops=(FORWARD, BACKWARD, BACKWARD_OVER),
)
