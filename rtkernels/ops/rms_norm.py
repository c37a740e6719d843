"""RMS normalisation over the last dimension, with optional residual addition, and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
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
    row_count,
    row_stride,
    rowed,
    token,
    vector_bytes,
)
from rtkernels._registry import Op, TorchOp
from rtkernels.errors import ArgumentError
from rtkernels.ops.column_sum import column_sum
from rtkernels.testing.rows import Row

_UNIT = "norm/rms_norm.cu"
_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_NARROW = (1, 2)  # elements per access where addresses do not allow 16 bytes
_REGISTER_THREADS, _REGISTER_CHUNKS = 512, (1, 2, 4)
_RING_THREADS, _RING_CHUNKS = 512, (1, 2, 4)


def _long_variants(*flags: tuple[bool, ...]) -> list[tuple[Any, ...]]:
    return [(t, w, v, *f) for t, w in _TYPES for v in (*_NARROW, _WIDTH[t]) for f in flags]


def _ring_stages(limit: int, chunks: int, dsum: bool) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes.

    Two are best where a thread holds much of a row (measured: 104.8 µs against 107.3 with four at 8192x8192).
    """
    per_stage = _ring_block(chunks) * 16 * chunks * (3 if dsum else 2)
    return min(4 if chunks == 1 else 2, (limit - 2048) // per_stage)


def _ring_block(chunks: int) -> int:
    """Return the most threads a block of the ring kernel may have: fewer where a thread holds more of the row."""
    return 768 if chunks == 1 else _RING_THREADS


def _ring_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    for t, w in _TYPES:
        for chunks in _RING_CHUNKS:
            for dsum in (False, True):
                stages = _ring_stages(shared_limit(target), chunks, dsum)
                if stages >= 2:
                    yield t, w, chunks, dsum, stages


_FWD_ARGS = (
    "x:ptr residual:ptr weight:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 eps:f64 offset:f64"
)
_BWD_ARGS = (
    "dy:ptr h:ptr weight:ptr dsum:ptr dh:ptr {last}:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 "
    "dsum_stride:i64 threads_per_row:i64 eps:f64 offset:f64"
)
_FWD = Kernel(
    _UNIT,
    "rms_norm_fwd",
    template="T W VEC CHUNKS RESIDUAL",
    args=_FWD_ARGS,
    variants=[(t, w, _WIDTH[t], c, r) for t, w in _TYPES for c in _REGISTER_CHUNKS for r in (False, True)],
    max_registers=80,
)
_FWD_LONG = Kernel(
    _UNIT,
    "rms_norm_fwd_long",
    template="T W VEC RESIDUAL",
    args=_FWD_ARGS,
    variants=_long_variants((False,), (True,)),
    max_registers=64,
)
_BWD = Kernel(
    _UNIT,
    "rms_norm_bwd",
    template="T W CHUNKS DSUM STAGES",
    args=_BWD_ARGS.format(last="partial"),
    variants=_ring_variants,
    max_registers=64,
)
_BWD_LONG = Kernel(
    _UNIT,
    "rms_norm_bwd_long",
    template="T W VEC DSUM",
    args=_BWD_ARGS.format(last="rstd"),
    variants=_long_variants((False,), (True,)),
    max_registers=64,
)
_BWD_WEIGHT = Kernel(
    _UNIT,
    "rms_norm_bwd_weight",
    template="T VEC",
    args="dy:ptr h:ptr rstd:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64",
    variants=[(t, v) for t in _WIDTH for v in (*_NARROW, _WIDTH[t])],
    max_registers=64,
)


# ---- validation and planning: plain metadata in, a bound launch out -------------------------------------------------


def _check_weight(shape: torch.Size, weight_device: int, cols: int, device: int) -> None:
    if tuple(shape) != (cols,):
        raise ArgumentError(f"weight has shape {tuple(shape)}; expected ({cols},), the last dimension of x")
    check_same("weight", weight_device, device, "device")


def _long_width(vec: int, t: str, w: str) -> int:
    """Return the access width in elements that the long kernels use, given the widest that x allows.

    Below 16 bytes, a weight wider than x may be less aligned than its access would be: one element then.
    """
    if vec == _WIDTH[t]:
        return vec
    return 1 if w != t else min(vec, max(_NARROW))


def _plan_fwd(dtype, shape, stride, device, w_dtype, w_shape, w_dense: bool, w_device, residual, align: int):
    """Return ``(launch, sizes, allocator and layout of y)``; None if an input must be copied first.

    `stride` is None for a contiguous x; `residual` is None or its metadata.
    """
    t = token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    rows, cols = row_count(shape), shape[-1]
    x_stride, residual_stride = row_stride(shape, stride or dense_strides(shape)), 0
    w = t
    if w_dtype is not None:
        w = token("weight", w_dtype, (dtype, torch.float32))
        _check_weight(w_shape, w_device, cols, device)
    if residual is not None:
        check_same("residual", residual[0], dtype, "dtype")
        check_same("residual", residual[1], shape, "shape")
        check_same("residual", residual[3], device, "device")
        residual_stride = row_stride(residual[1], residual[2])
    memory = allocator(device), (tuple(shape), dense_strides(shape), dtype)
    if rows == 0 or cols == 0:
        return None, (), *memory
    if x_stride is None or residual_stride is None or not w_dense:
        return None
    size = dtype.itemsize
    vec = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) // size
    has_residual = residual is not None
    vectors = cols // vec
    if vec == _WIDTH[t] and vectors <= _REGISTER_THREADS * max(_REGISTER_CHUNKS):
        chunks = 1 if vectors <= 64 else 2 if vectors <= 128 else 4
        threads = group_threads(-(-vectors // chunks), _REGISTER_THREADS)
        kernel, variant = _FWD, (t, w, vec, chunks, has_residual)
    else:
        vec = _long_width(vec, t, w)
        threads = group_threads(-(-cols // vec), 1024)
        kernel, variant = _FWD_LONG, (t, w, vec, has_residual)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), GRID_LIMIT)
    dims = (rows, cols, x_stride, residual_stride, threads)
    return kernel.bind(variant, device, grid, block), dims, *memory


_FWD_PLANS = Plans(_plan_fwd)


class _BackwardPlan:
    """The launches of one backward call and the workspace they need."""

    def __init__(self, dy, h, weight, dsum, align: int, weight_grad: bool) -> None:
        dtype, shape, _, device = h
        t = token("h", dtype)
        w = t if weight is None else token("weight", weight[0], (dtype, torch.float32))
        info = device_info(device)
        size, rows, cols = dtype.itemsize, row_count(shape), shape[-1]
        strides = [row_stride(*m[1:3]) for m in (dy, h)] + [0 if dsum is None else row_stride(*dsum[1:3])]
        vec = vector_bytes(align, cols * size, *(s * size for s in strides)) // size
        vectors = cols // vec
        chunks = next((c for c in _RING_CHUNKS if vectors <= _RING_THREADS * c), _RING_CHUNKS[-1])
        stages = _ring_stages(info.shared_per_block, chunks, dsum is not None)
        self.cols, self.device, self.weight_grad, self.partial_launch = cols, device, weight_grad, None
        if vec == _WIDTH[t] and vectors <= _RING_THREADS * chunks and stages >= 2:
            threads = group_threads(-(-vectors // chunks), _RING_THREADS)
            most = _ring_block(chunks) // threads if threads <= 32 else min(_ring_block(chunks) // threads, 15)
            groups = max(1, min(most, rows // info.sm_count))
            groups += -groups % (32 // min(threads, 32))  # whole warps
            shared = stages * groups * threads * 16 * chunks * (2 if dsum is None else 3)
            grid = self.partial_rows = min(info.sm_count, -(-rows // groups))
            variant = (t, w, chunks, dsum is not None, stages)
            self.launch = _BWD.bind(variant, device, grid, groups * threads, shared)
        else:
            vec = _long_width(vec, t, w)
            threads = group_threads(-(-cols // vec), 1024)
            block = block_of(threads)
            grid = min(-(-rows // (block // threads)), GRID_LIMIT)
            self.launch = _BWD_LONG.bind((t, w, vec, dsum is not None), device, grid, block)
            if weight_grad:
                column_blocks = -(-cols // (256 * vec))
                self.partial_rows = min(max(1, 4 * info.sm_count // column_blocks), rows, 65535)
                self.partial_launch = _BWD_WEIGHT.bind((t, vec), device, (column_blocks, self.partial_rows), 256)
                self.partial_args = (rows, cols, *strides[:2])
        self.rows = rows
        self.args = (rows, cols, *strides, threads)

    def run(self, dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float):
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        inputs = (dy.data_ptr(), h.data_ptr(), address(weight), address(dsum))
        if not self.weight_grad:
            self.launch(*inputs, dh.data_ptr(), 0, *self.args, eps, offset)
            return dh, nothing(h)
        partial = torch.empty(self.partial_rows, self.cols, dtype=torch.float32, device=h.device)
        if self.partial_launch is None:
            self.launch(*inputs, dh.data_ptr(), partial.data_ptr(), *self.args, eps, offset)
        else:
            rstd = torch.empty(self.rows, dtype=torch.float32, device=h.device)
            self.launch(*inputs, dh.data_ptr(), rstd.data_ptr(), *self.args, eps, offset)
            self.partial_launch(*inputs[:2], rstd.data_ptr(), partial.data_ptr(), *self.partial_args)
        return dh, column_sum(partial, weight.dtype)


_BWD_PLANS = Plans(_BackwardPlan)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    x_address = x.data_ptr()
    x_stride = None if x.is_contiguous() else x.stride()  # the common case costs less to hash
    if weight is None:
        weight_address = 0
        plan = _FWD_PLANS[x.dtype, x.shape, x_stride, x.get_device(), None, None, True, None, None, x_address & 15]
    else:
        weight_address = weight.data_ptr()
        plan = _FWD_PLANS[
            x.dtype, x.shape, x_stride, x.get_device(),
            weight.dtype, weight.shape, weight.is_contiguous(), weight.get_device(),
            None, (x_address | weight_address) & 15,
        ]  # fmt: skip
    if plan is None:
        return _launch_fwd(rowed(x), weight if weight is None else weight.contiguous(), eps, offset)
    launch, dims, allocate, layout = plan
    y = allocate(*layout)
    if launch is not None:
        launch(x_address, 0, weight_address, y.data_ptr(), 0, *dims, eps, offset)
    return y


def _launch_add_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float):
    addresses = x.data_ptr(), residual.data_ptr(), address(weight)
    align = (addresses[0] | addresses[1] | addresses[2]) & 15
    w = (None, None, True, None)
    if weight is not None:
        w = weight.dtype, weight.shape, weight.is_contiguous(), weight.get_device()
    plan = _FWD_PLANS[(*metadata(x), *w, metadata(residual), align)]
    if plan is None:
        weight = weight if weight is None else weight.contiguous()
        return _launch_add_fwd(rowed(x), rowed(residual), weight, eps, offset)
    launch, dims, allocate, layout = plan
    y, total = allocate(*layout), allocate(*layout)
    if launch is not None:
        launch(*addresses, y.data_ptr(), total.data_ptr(), *dims, eps, offset)
    return y, total


def _launch_bwd(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool
):
    _check_bwd(dy, h, weight, dsum, weight_grad)
    if h.numel() == 0:
        return torch.empty_like(h), torch.zeros_like(weight) if weight_grad else nothing(h)
    dy, h, dsum = rowed(dy), rowed(h), rowed(dsum)
    weight = weight if weight is None else weight.contiguous()
    align = (dy.data_ptr() | h.data_ptr() | address(weight) | address(dsum)) & 15
    plan = _BWD_PLANS[metadata(dy), metadata(h), metadata(weight), metadata(dsum), align, weight_grad]
    return plan.run(dy, h, weight, dsum, eps, offset)


def _check_bwd(dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, weight_grad: bool) -> None:
    for name, tensor in (("dy", dy), ("dsum", dsum)):
        if tensor is not None:
            check_same(name, tensor.dtype, h.dtype, "dtype", of="h")
            check_same(name, tensor.shape, h.shape, "shape", of="h")
            check_same(name, tensor.get_device(), h.get_device(), "device", of="h")
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")
    _validate(h, weight, None)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _gain(weight: Tensor | None, offset: float) -> Tensor | float:
    return 1.0 if weight is None else weight.float() + offset


def _validate(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> None:
    """Raise what the launchers would raise, for devices that have no launcher."""
    token("x", x.dtype)
    if x.dim() == 0:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    if weight is not None:
        token("weight", weight.dtype, (x.dtype, torch.float32))
        _check_weight(weight.shape, weight.get_device(), x.shape[-1], x.get_device())
    if residual is not None:
        check_same("residual", residual.dtype, x.dtype, "dtype")
        check_same("residual", residual.shape, x.shape, "shape")
        check_same("residual", residual.get_device(), x.get_device(), "device")


def _reference_fwd(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    _validate(x, weight, None)
    h = x.float()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * rstd * _gain(weight, offset)).to(x.dtype).contiguous()


def _reference_add_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float):
    _validate(x, weight, residual)
    total = (x.float() + residual.float()).to(x.dtype).contiguous()
    return _reference_fwd(total, weight, eps, offset), total


def _reference_bwd(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool
):
    _check_bwd(dy, h, weight, dsum, weight_grad)
    hf, dyf = h.float(), dy.float()
    rstd = torch.rsqrt(hf.square().mean(-1, keepdim=True) + eps)
    g = dyf * _gain(weight, offset)
    dh = rstd * g - hf * rstd**3 * (g * hf).mean(-1, keepdim=True)
    if dsum is not None:
        dh = dh + dsum.float()
    dweight = nothing(h)
    if weight_grad:
        dweight = (dyf * hf * rstd).reshape(row_count(h.shape), h.shape[-1]).sum(0).to(weight.dtype)
    return dh.to(h.dtype).contiguous(), dweight


def _fake_fwd(x, weight, eps, offset):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add_fwd(x, residual, weight, eps, offset):
    return _fake_fwd(x, weight, eps, offset), _fake_fwd(x, weight, eps, offset)


def _fake_bwd(dy, h, weight, dsum, eps, offset, weight_grad):
    return _fake_fwd(h, weight, eps, offset), torch.empty_like(weight) if weight_grad else nothing(h)


FORWARD = TorchOp(
    "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
ADD_FORWARD = TorchOp(
    "add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)",
    launch=_launch_add_fwd,
    reference=_reference_add_fwd,
    fake=_fake_add_fwd,
)
BACKWARD = TorchOp(
    "rms_norm_bwd(Tensor dy, Tensor h, Tensor? weight, Tensor? dsum, float eps, float offset, bool weight_grad)"
    " -> (Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


_forward = FORWARD.call


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps, offset):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset = eps, offset
        if residual is None:
            ctx.save_for_backward(x, weight)
            return FORWARD(x, weight, eps, offset)
        y, total = ADD_FORWARD(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum=None):
        h, weight = ctx.saved_tensors
        if dy is None:
            return dsum, None, dsum, None, None
        weight_grad = ctx.needs_input_grad[1]
        dh, dweight = BACKWARD(dy, h, weight, dsum, ctx.eps, ctx.offset, weight_grad)
        return dh, dweight if weight_grad else None, dh if ctx.needs_input_grad[2] else None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension by its root mean square.

    ``y = h / sqrt(mean(h^2) + eps) * (offset + weight)`` with ``h = x``, or ``h = x + residual`` rounded to the dtype
    of x. Computed in fp32 and rounded once. Differentiable once in x, weight and residual.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride and
            evenly spaced). May be any object with ``__dlpack__``; the result is then of its kind.
        weight: ``[n]`` of x's dtype or float32; None for ones (then `offset` is not used).
        eps: Added to the mean square; None for 1e-6.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Same shape and dtype as x.

    Returns:
        ``y``, dense, of x's shape and dtype; with a residual ``(y, h)``.
    """
    if eps is None:  # as a default value it would become symbolic under torch.compile(dynamic=True)
        eps = 1e-6
    if not isinstance(x, Tensor):
        return interop.call(rms_norm, x, weight, eps=eps, offset=offset, residual=residual)
    if is_grad_enabled() and needs_grad(x, weight, residual):
        return _RmsNorm.apply(x, weight, residual, eps, offset)
    if residual is None:
        return _forward(x, weight, eps, offset)
    return ADD_FORWARD(x, residual, weight, eps, offset)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    weight = torch.randn(48, generator=g, device=device)
    yield FORWARD, (x, weight, 1e-6, 0.0)
    yield FORWARD, (x.bfloat16(), None, 1e-6, 0.0)
    yield ADD_FORWARD, (x, x * 2, weight, 1e-6, 1.0)
    yield BACKWARD, (x * 3, x, weight, None, 1e-6, 0.0, True)
    yield BACKWARD, (x * 3, x, weight, x, 1e-6, 0.0, True)
    yield BACKWARD, (x * 3, x, None, None, 1e-6, 0.0, False)


def _rows() -> Iterator[Row]:
    for cols in (2048, 4096, 8192):
        rows, n = 8192, 8192 * cols * 2

        def make(device: str, generator: torch.Generator, *, backward: bool, cols: int = cols) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            inputs = {"x": normal(8192, cols), "weight": normal(cols), "eps": 1e-6}
            return {"dy": normal(8192, cols), **inputs} if backward else inputs

        yield Row(
            name="rms_norm_fwd",
            shape=f"{rows}x{cols}",
            make=lambda device, g, make=make: make(device, g, backward=False),
            ours=lambda x, weight, eps: FORWARD(x, weight, eps, 0.0),
            torch=_torch_fwd,
            fused=lambda x, weight, eps: F.rms_norm(x, (x.shape[-1],), weight, eps),
            bytes=2 * n + 2 * cols,
        )
        yield Row(
            name="rms_norm_bwd",
            shape=f"{rows}x{cols}",
            make=lambda device, g, make=make: make(device, g, backward=True),
            ours=lambda dy, x, weight, eps: BACKWARD(dy, x, weight, None, eps, 0.0, True),
            torch=_torch_bwd,
            bytes=3 * n + 4 * cols,
        )


def _torch_fwd(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float() if x.dtype != torch.float64 else x
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _torch_bwd(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    h, d, w = x.to(wide), dy.to(wide), weight.to(wide)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    g = d * w
    dx = rstd * g - h * rstd**3 * (g * h).mean(-1, keepdim=True)
    return dx.to(x.dtype), (d * h * rstd).sum(0).to(weight.dtype)


OP = Op(
    "rms_norm",
    public=("rms_norm",),
    kernels=(_FWD, _FWD_LONG, _BWD, _BWD_LONG, _BWD_WEIGHT),
    torch_ops=(FORWARD, ADD_FORWARD, BACKWARD),
    samples=_samples,
    rows=_rows,
)
