"""Layer normalisation over the last dimension, with optional residual addition, and its backward."""

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

_UNIT = "norm/layer_norm.cu"
_TYPES = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
_WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_REGISTER_THREADS, _REGISTER_CHUNKS = 512, (1, 4)
_RING_THREADS = 512
_RING_CHUNKS = {1: 256, 2: 1024, 4: 2048}  # pieces of 16 bytes in a thread, and in the longest row it is used for
_WIDTHS = [(t, vec) for t in _WIDTH for vec in (1, _WIDTH[t])]


def _ring_stages(limit: int, chunks: int, dsum: bool) -> int:
    """Return how many rows per thread group the cp.async ring holds within `limit` bytes (4 at most)."""
    return min(4, (limit - 2048) // (_RING_THREADS * 16 * chunks * (3 if dsum else 2)))


def _ring_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    for t in _WIDTH:
        for chunks in _RING_CHUNKS:
            for dsum in (False, True):
                stages = _ring_stages(shared_limit(target), chunks, dsum)
                if stages >= 2:
                    yield t, chunks, dsum, stages


_FWD_ARGS = (
    "x:ptr residual:ptr weight:ptr bias:ptr y:ptr sum:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 "
    "threads_per_row:i64 eps:f64 offset:f64"
)
_BWD_ARGS = (
    "dy:ptr h:ptr weight:ptr dsum:ptr dh:ptr {last}:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 "
    "dsum_stride:i64 threads_per_row:i64 eps:f64 offset:f64 wide:i64"
)
_FWD = Kernel(
    _UNIT,
    "layer_norm_fwd",
    template="T W CHUNKS RESIDUAL",
    args=_FWD_ARGS,
    variants=[(t, w, c, r) for t, w in _TYPES for c in _REGISTER_CHUNKS for r in (False, True)],
    max_registers=128,
)
_FWD_LONG = Kernel(
    _UNIT,
    "layer_norm_fwd_long",
    template="T VEC",
    args=f"{_FWD_ARGS} wide:i64",
    variants=_WIDTHS,
    max_registers=64,
)
_BWD = Kernel(
    _UNIT,
    "layer_norm_bwd",
    template="T CHUNKS DSUM STAGES",
    args=f"{_BWD_ARGS.format(last='partial')} partial_stride:i64",
    variants=_ring_variants,
    max_registers=128,
)
_BWD_LONG = Kernel(
    _UNIT,
    "layer_norm_bwd_long",
    template="T VEC",
    args=_BWD_ARGS.format(last="stats"),
    variants=_WIDTHS,
    max_registers=64,
)
_BWD_WEIGHT = Kernel(
    _UNIT,
    "layer_norm_bwd_weight",
    template="T VEC",
    args="dy:ptr h:ptr stats:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 h_stride:i64 partial_stride:i64",
    variants=_WIDTHS,
    max_registers=48,
)


# ---- validation and planning: plain metadata in, a bound launch out -------------------------------------------------

_Meta = tuple[Any, ...]


def _check(x: _Meta, weight: _Meta | None, bias: _Meta | None, residual: _Meta | None) -> None:
    """Raise an ArgumentError for arguments that do not fit together."""
    dtype, shape, _, device = x
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    for name, meta in (("weight", weight), ("bias", bias)):
        if meta is not None:
            token(name, meta[0], (dtype, torch.float32))
            if tuple(meta[1]) != (shape[-1],):
                raise ArgumentError(
                    f"{name} has shape {tuple(meta[1])}; expected ({shape[-1]},), the last dimension of x"
                )
            check_same(name, meta[3], device, "device index")
    if weight is not None and bias is not None:
        check_same("bias", bias[0], weight[0], "dtype", of="weight")
    if residual is not None:
        check_same("residual", residual[0], dtype, "dtype")
        check_same("residual", residual[1], shape, "shape")
        check_same("residual", residual[3], device, "device index")


def _is_dense(vector: _Meta | None) -> bool:
    return vector is None or vector[1][0] <= 1 or vector[2] == (1,)


def _parameter_dtype(weight: _Meta | None, bias: _Meta | None, dtype: torch.dtype) -> torch.dtype:
    return weight[0] if weight is not None else bias[0] if bias is not None else dtype


def _plan_fwd(x: _Meta, weight: _Meta | None, bias: _Meta | None, residual: _Meta | None, align: int):
    """Return ``(launch, what it ends with, allocator and layout of y)``; None if an input must be copied first."""
    _check(x, weight, bias, residual)
    dtype, shape, stride, device = x
    rows, cols = row_count(shape), shape[-1]
    memory = allocator(device), (tuple(shape), dense_strides(shape), dtype)
    if rows == 0 or cols == 0:
        return None, (), (), *memory
    x_stride = row_stride(shape, stride)
    residual_stride = 0 if residual is None else row_stride(residual[1], residual[2])
    if x_stride is None or residual_stride is None or not (_is_dense(weight) and _is_dense(bias)):
        return None
    t, w = token("x", dtype), token("weight", _parameter_dtype(weight, bias, dtype))
    size = dtype.itemsize
    full = vector_bytes(align, cols * size, x_stride * size, residual_stride * size) == 16
    vectors = cols // _WIDTH[t]
    if full and vectors <= _REGISTER_THREADS * max(_REGISTER_CHUNKS):
        chunks = 1 if vectors <= 32 else 4
        threads = group_threads(-(-vectors // chunks), _REGISTER_THREADS)
        kernel, variant, wide = _FWD, (t, w, chunks, residual is not None), ()
    else:
        vec = _WIDTH[t] if full else 1
        threads = group_threads(-(-cols // vec), 1024)
        kernel, variant, wide = _FWD_LONG, (t, vec), (int(w == "fp32"),)
    block = block_of(threads)
    grid = min(-(-rows // (block // threads)), GRID_LIMIT)
    dims = (rows, cols, x_stride, residual_stride, threads)
    return kernel.bind(variant, device, grid, block), dims, wide, *memory


_FWD_PLANS = Plans(_plan_fwd)


class _BackwardPlan:
    """The launches of one backward call and the workspace they need."""

    def __init__(self, dy: _Meta, h: _Meta, weight: _Meta | None, dsum: _Meta | None, align: int, sums: int) -> None:
        dtype, shape, _, device = h
        t, info = token("h", dtype), device_info(device)
        size, rows, cols = dtype.itemsize, row_count(shape), shape[-1]
        strides = [row_stride(*m[1:3]) for m in (dy, h)] + [0 if dsum is None else row_stride(*dsum[1:3])]
        full = vector_bytes(align, cols * size, *(s * size for s in strides)) == 16
        vectors = cols // _WIDTH[t]
        wide = int(weight is not None and weight[0] == torch.float32)
        chunks = next((c for c, most in _RING_CHUNKS.items() if vectors <= most), 0)
        stages = _ring_stages(info.shared_per_block, chunks, dsum is not None) if chunks else 0
        self.rows, self.cols, self.sums, self.partial_launch = rows, cols, sums, None
        if full and stages >= 2:
            threads = group_threads(-(-vectors // chunks), _RING_THREADS)
            most = _RING_THREADS // threads if threads <= 32 else min(_RING_THREADS // threads, 15)
            groups = max(1, min(most, rows // info.sm_count))
            groups += -groups % (32 // min(threads, 32))  # whole warps
            shared = stages * groups * threads * 16 * chunks * (2 if dsum is None else 3)
            self.partial_rows = min(info.sm_count, -(-rows // groups))
            variant = (t, chunks, dsum is not None, stages)
            self.launch = _BWD.bind(variant, device, self.partial_rows, groups * threads, shared)
            self.tail = (wide, max(sums, 1) * cols)
        else:
            vec = _WIDTH[t] if full else 1
            threads = group_threads(-(-cols // vec), 1024)
            block = block_of(threads)
            self.launch = _BWD_LONG.bind((t, vec), device, min(-(-rows // (block // threads)), GRID_LIMIT), block)
            self.tail = (wide,)
            if sums:
                column_blocks = -(-cols // (256 * vec))
                self.partial_rows = min(max(1, 4 * info.sm_count // column_blocks), rows, 65535)
                self.partial_launch = _BWD_WEIGHT.bind((t, vec), device, (column_blocks, self.partial_rows), 256)
                self.partial_args = (rows, cols, *strides[:2], sums * cols)
        self.args = (rows, cols, *strides, threads)

    def run(self, dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, dtype):
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        inputs = (dy.data_ptr(), h.data_ptr(), address(weight), address(dsum))
        if not self.sums:
            self.launch(*inputs, dh.data_ptr(), 0, *self.args, eps, offset, *self.tail)
            return dh, nothing(h)
        partial = torch.empty(self.partial_rows, self.sums * self.cols, dtype=torch.float32, device=h.device)
        if self.partial_launch is None:
            self.launch(*inputs, dh.data_ptr(), partial.data_ptr(), *self.args, eps, offset, *self.tail)
        else:
            stats = torch.empty(self.rows, 2, dtype=torch.float32, device=h.device)
            self.launch(*inputs, dh.data_ptr(), stats.data_ptr(), *self.args, eps, offset, *self.tail)
            self.partial_launch(*inputs[:2], stats.data_ptr(), partial.data_ptr(), *self.partial_args)
        return dh, column_sum(partial, dtype).view(self.sums, self.cols)


_BWD_PLANS = Plans(_BackwardPlan)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    x_address, weight_address, bias_address = x.data_ptr(), address(weight), address(bias)
    plan = _FWD_PLANS[
        (x.dtype, x.shape, x.stride(), x.get_device()),
        None if weight is None else (weight.dtype, weight.shape, weight.stride(), weight.get_device()),
        None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device()),
        None,
        (x_address | weight_address | bias_address) & 15,
    ]
    if plan is None:
        return _launch_fwd(rowed(x), _dense(weight), _dense(bias), eps, offset)
    launch, dims, wide, allocate, layout = plan
    y = allocate(*layout)
    if launch is not None:
        launch(x_address, 0, weight_address, bias_address, y.data_ptr(), 0, *dims, eps, offset, *wide)
    return y


def _launch_add_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float):
    addresses = x.data_ptr(), residual.data_ptr(), address(weight), address(bias)
    align = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15
    plan = _FWD_PLANS[metadata(x), metadata(weight), metadata(bias), metadata(residual), align]
    if plan is None:
        return _launch_add_fwd(rowed(x), rowed(residual), _dense(weight), _dense(bias), eps, offset)
    launch, dims, wide, allocate, layout = plan
    y, total = allocate(*layout), allocate(*layout)
    if launch is not None:
        launch(*addresses, y.data_ptr(), total.data_ptr(), *dims, eps, offset, *wide)
    return y, total


def _launch_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dsum: Tensor | None,
    eps: float,
    offset: float,
    parameter_grad: bool,
):
    _check_bwd(dy, h, weight, bias, dsum, parameter_grad)
    sums, dtype = _parameter_sums(weight, bias, parameter_grad)
    if h.numel() == 0:
        return torch.empty(h.shape, dtype=h.dtype, device=h.device), (
            torch.zeros(sums, h.shape[-1], dtype=dtype, device=h.device) if sums else nothing(h)
        )
    dy, h, weight, dsum = rowed(dy), rowed(h), _dense(weight), rowed(dsum)
    align = (dy.data_ptr() | h.data_ptr() | address(weight) | address(dsum)) & 15
    plan = _BWD_PLANS[metadata(dy), metadata(h), metadata(weight), metadata(dsum), align, sums]
    return plan.run(dy, h, weight, dsum, eps, offset, dtype)


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _parameter_sums(weight: Tensor | None, bias: Tensor | None, wanted: bool) -> tuple[int, torch.dtype | None]:
    """Return how many parameter gradients a backward call makes, and their dtype. dbias always follows dweight."""
    if not wanted:
        return 0, None
    return (1, weight.dtype) if bias is None else (2, bias.dtype)


def _check_bwd(dy, h, weight, bias, dsum, parameter_grad: bool) -> None:
    _check(metadata(h), metadata(weight), metadata(bias), None)
    for name, tensor in (("dy", dy), ("dsum", dsum)):
        if tensor is not None:
            check_same(name, tensor.dtype, h.dtype, "dtype", of="h")
            check_same(name, tensor.shape, h.shape, "shape", of="h")
            check_same(name, tensor.get_device(), h.get_device(), "device index", of="h")
    if parameter_grad and weight is None and bias is None:
        raise ArgumentError("parameter_grad is True but there is neither weight nor bias")


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _gain(weight: Tensor | None, offset: float) -> Tensor | float:
    return 1.0 if weight is None else weight.float() + offset


def _normalised(h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(h - mean) * rstd`` and rstd."""
    centred = h - h.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


def _reference_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    _check(metadata(x), metadata(weight), metadata(bias), None)
    y = _normalised(x.float(), eps)[0] * _gain(weight, offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).contiguous()


def _reference_add_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
):
    _check(metadata(x), metadata(weight), metadata(bias), metadata(residual))
    total = (x.float() + residual.float()).to(x.dtype).contiguous()
    return _reference_fwd(total, weight, bias, eps, offset), total


def _reference_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dsum: Tensor | None,
    eps: float,
    offset: float,
    parameter_grad: bool,
):
    _check_bwd(dy, h, weight, bias, dsum, parameter_grad)
    d = dy.float()
    normalised, rstd = _normalised(h.float(), eps)
    g = d * _gain(weight, offset)
    dh = rstd * (g - g.mean(-1, keepdim=True) - normalised * (g * normalised).mean(-1, keepdim=True))
    if dsum is not None:
        dh = dh + dsum.float()
    sums, dtype = _parameter_sums(weight, bias, parameter_grad)
    gradients = nothing(h)
    if sums:
        both = torch.stack((d * normalised, d)[:sums]).reshape(sums, row_count(h.shape), h.shape[-1])
        gradients = both.sum(1).to(dtype)
    return dh.to(h.dtype).contiguous(), gradients


def _fake_fwd(x, weight, bias, eps, offset):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add_fwd(x, residual, weight, bias, eps, offset):
    return _fake_fwd(x, weight, bias, eps, offset), _fake_fwd(x, weight, bias, eps, offset)


def _fake_bwd(dy, h, weight, bias, dsum, eps, offset, parameter_grad):
    sums, dtype = _parameter_sums(weight, bias, parameter_grad)
    gradients = h.new_empty(sums, h.shape[-1], dtype=dtype) if sums else nothing(h)
    return _fake_fwd(h, weight, bias, eps, offset), gradients


FORWARD = TorchOp(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
ADD_FORWARD = TorchOp(
    "add_layer_norm_fwd(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset)"
    " -> (Tensor, Tensor)",
    launch=_launch_add_fwd,
    reference=_reference_add_fwd,
    fake=_fake_add_fwd,
)
# The second result is [1, n] (dweight), [2, n] (dweight and dbias) or empty. bias only says that its gradient is wanted.
BACKWARD = TorchOp(
    "layer_norm_bwd(Tensor dy, Tensor h, Tensor? weight, Tensor? bias, Tensor? dsum, float eps, float offset,"
    " bool parameter_grad) -> (Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


_forward = FORWARD.call


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps, offset):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset = eps, offset
        if residual is None:
            ctx.save_for_backward(x, weight, bias)
            return FORWARD(x, weight, bias, eps, offset)
        y, total = ADD_FORWARD(x, residual, weight, bias, eps, offset)
        ctx.save_for_backward(total, weight, bias)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum=None):
        if dy is None:
            return dsum, None, None, dsum, None, None
        h, weight, bias = ctx.saved_tensors
        _, want_weight, want_bias, want_residual, _, _ = ctx.needs_input_grad
        dh, gradients = BACKWARD(
            dy, h, weight, bias if want_bias else None, dsum, ctx.eps, ctx.offset, want_weight or want_bias
        )
        dweight = gradients[0] if want_weight else None
        dbias = gradients[1] if want_bias else None
        return dh, dweight, dbias, dh if want_residual else None, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension to mean 0 and variance 1.

    ``y = (h - mean(h)) / sqrt(var(h) + eps) * (offset + weight) + bias`` with ``h = x``, or ``h = x + residual`` rounded
    to the dtype of x. Computed in fp32 and rounded once; the variance is that of the differences from the mean, so a
    mean far from zero costs no digits. Differentiable once in x, weight, bias and residual.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride and
            evenly spaced). May be any object with ``__dlpack__``; the result is then of its kind.
        weight: ``[n]`` of x's dtype or float32; None for ones (then `offset` is not used).
        bias: ``[n]`` of x's dtype or float32, the same as the weight's; None for zeros.
        eps: Added to the variance.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Same shape and dtype as x.

    Returns:
        ``y``, dense, of x's shape and dtype; with a residual ``(y, h)``.
    """
    if not isinstance(x, Tensor):
        return interop.call(layer_norm, x, weight, bias, eps=eps, offset=offset, residual=residual)
    if is_grad_enabled() and (needs_grad(x, weight, bias) or needs_grad(x, residual)):
        return _LayerNorm.apply(x, weight, bias, residual, eps, offset)
    if residual is None:
        return _forward(x, weight, bias, eps, offset)
    return ADD_FORWARD(x, residual, weight, bias, eps, offset)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    weight, bias = torch.randn(2, 48, generator=g, device=device).unbind()
    yield FORWARD, (x, weight, bias, 1e-5, 0.0)
    yield FORWARD, (x.bfloat16(), None, None, 1e-5, 0.0)
    yield FORWARD, (x.half(), None, bias, 1e-5, 0.0)
    yield ADD_FORWARD, (x, x * 2, weight, bias, 1e-5, 1.0)
    yield BACKWARD, (x * 3, x, weight, bias, None, 1e-5, 0.0, True)
    yield BACKWARD, (x * 3, x, weight, None, x, 1e-5, 0.0, True)
    yield BACKWARD, (x * 3, x, None, None, None, 1e-5, 0.0, False)


def _torch_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (_normalised(x.to(wide), eps)[0] * weight + bias).to(x.dtype)


def _torch_bwd(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    d = dy.to(wide)
    normalised, rstd = _normalised(x.to(wide), eps)
    g = d * weight.to(wide)
    dx = rstd * (g - g.mean(-1, keepdim=True) - normalised * (g * normalised).mean(-1, keepdim=True))
    return dx.to(x.dtype), torch.stack(((d * normalised).sum(0), d.sum(0))).to(weight.dtype)


def _rows() -> Iterator[Row]:
    rows = 8192
    for cols in (2048, 4096):
        n = rows * cols * 2

        def make(device: str, generator: torch.Generator, *, backward: bool, cols: int = cols) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            inputs = {"x": normal(rows, cols), "weight": normal(cols), "bias": normal(cols), "eps": 1e-5}
            return {"dy": normal(rows, cols), **inputs} if backward else inputs

        yield Row(
            name="layer_norm_fwd",
            shape=f"{rows}x{cols}",
            make=lambda device, g, make=make: make(device, g, backward=False),
            ours=lambda x, weight, bias, eps: FORWARD(x, weight, bias, eps, 0.0),
            torch=_torch_fwd,
            fused=lambda x, weight, bias, eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
            bytes=2 * n + 4 * cols,
        )
        yield Row(
            name="layer_norm_bwd",
            shape=f"{rows}x{cols}",
            make=lambda device, g, make=make: make(device, g, backward=True),
            ours=lambda dy, x, weight, bias, eps: BACKWARD(dy, x, weight, bias, None, eps, 0.0, True),
            torch=_torch_bwd,
            bytes=3 * n + 6 * cols,
        )


OP = Op(
    "layer_norm",
    public=("layer_norm",),
    kernels=(_FWD, _FWD_LONG, _BWD, _BWD_LONG, _BWD_WEIGHT),
    torch_ops=(FORWARD, ADD_FORWARD, BACKWARD),
    samples=_samples,
    rows=_rows,
)
