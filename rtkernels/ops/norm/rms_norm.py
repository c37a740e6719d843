"""RMS normalisation over the last dimension, with optional residual addition, and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.rms_norm_plan import BWD_PLANS, FWD_PLANS, KERNELS, ForwardPlan, check_weight
from rtkernels.ops.norm.statistics import BACKWARDS, check_no_gradient, check_out, check_over, with_statistics
from rtkernels.runtime.layout import address, check_same, may_overlap, metadata, nothing, row_count, rowed, token
from rtkernels.runtime.operator.autograd import (
    constant,
    detached,
    may_overwrite,
    needs_grad,
    once_differentiable,
    overwrite_once,
)
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.sharding import shard_rows
from rtkernels.runtime.torch_private import is_dynamo_compiling

# ---- launchers ------------------------------------------------------------------------------------------------------


def _plan(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, out: Tensor | None = None
) -> ForwardPlan | None:
    stride = None if x.is_contiguous() else x.stride()  # the common case costs less to hash
    w = (None, None, True, None)
    if weight is not None:
        w = weight.dtype, weight.shape, weight.is_contiguous(), weight.get_device()
    align = (x.data_ptr() | address(residual) | address(weight) | address(out)) & 15
    return FWD_PLANS[(x.dtype, x.shape, stride, x.get_device(), *w, metadata(residual), align, eps, offset)]


def _plan_fwd(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> ForwardPlan | None:
    return _plan(x, None, weight, eps, offset)


def _copied(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Any, ...]:
    return rowed(x), weight if weight is None else weight.contiguous(), eps, offset


def _launch_add_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float):
    plan = _plan(x, residual, weight, eps, offset)
    if plan is None:
        weight = weight if weight is None else weight.contiguous()
        return _launch_add_fwd(rowed(x), rowed(residual), weight, eps, offset)
    y, total = plan.allocate(*plan.layout), plan.allocate(*plan.layout)
    if plan.launch is not None:
        plan.launch(x.data_ptr(), residual.data_ptr(), address(weight), y.data_ptr(), total.data_ptr())
    return y, total


def _launch_out(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, out: Tensor
) -> Tensor:
    check_out(out, x, residual, weight)
    if not out.is_contiguous():
        if residual is None:
            made, total = FORWARD.launch(x, weight, eps, offset), nothing(x)
        else:
            made, total = _launch_add_fwd(x, residual, weight, eps, offset)
        out.copy_(made)
        return total
    x, residual, weight = rowed(x), rowed(residual), weight if weight is None else weight.contiguous()
    plan = _plan(x, residual, weight, eps, offset, out)
    total = nothing(x) if residual is None else plan.allocate(*plan.layout)
    if plan.launch is not None:
        inputs = x.data_ptr(), address(residual), address(weight)
        plan.launch(*inputs, out.data_ptr(), 0 if residual is None else total.data_ptr())
    return total


def _launch_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor | None,
    dsum: Tensor | None,
    eps: float,
    offset: float,
    weight_grad: bool,
    over: bool = False,
):
    _check_bwd(dy, h, weight, dsum, weight_grad)
    if h.numel() == 0:
        return torch.empty_like(h), torch.zeros_like(weight) if weight_grad else nothing(h)
    dy, h, dsum = rowed(dy), rowed(h), rowed(dsum)
    weight = weight if weight is None else weight.contiguous()
    align = (dy.data_ptr() | h.data_ptr() | address(weight) | address(dsum)) & 15
    plan = BWD_PLANS[metadata(dy), metadata(h), metadata(weight), metadata(dsum), align, weight_grad]
    return plan.run(dy, h, weight, dsum, eps, offset, over)


def _launch_bwd_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool
) -> Tensor:
    check_over(h, dy, weight, dsum)
    dh, dweight = _launch_bwd(dy, h, weight, dsum, eps, offset, weight_grad, over=True)
    if dh is not h:
        h.copy_(dh)
    return dweight


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
        check_weight(weight.shape, weight.get_device(), x.shape[-1], x.get_device())
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


def _reference_out(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, out: Tensor
) -> Tensor:
    _validate(x, weight, residual)
    check_out(out, x, residual, weight)
    if residual is None:
        made, total = _reference_fwd(x, weight, eps, offset), nothing(x)
    else:
        made, total = _reference_add_fwd(x, residual, weight, eps, offset)
    out.copy_(made)
    return total


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


def _reference_bwd_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool
) -> Tensor:
    check_over(h, dy, weight, dsum)
    dh, dweight = _reference_bwd(dy, h, weight, dsum, eps, offset, weight_grad)
    h.copy_(dh)
    return dweight


def _fake_fwd(x, weight, eps, offset):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add_fwd(x, residual, weight, eps, offset):
    return _fake_fwd(x, weight, eps, offset), _fake_fwd(x, weight, eps, offset)


def _fake_out(x, residual, weight, eps, offset, out):
    return nothing(x) if residual is None else _fake_fwd(x, weight, eps, offset)


def _fake_bwd(dy, h, weight, dsum, eps, offset, weight_grad):
    return _fake_fwd(h, weight, eps, offset), torch.empty_like(weight) if weight_grad else nothing(h)


FORWARD = TorchOp(
    "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset) -> Tensor",
    plan=_plan_fwd,
    copied=_copied,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
ADD_FORWARD = TorchOp(
    "add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)",
    launch=_launch_add_fwd,
    reference=_reference_add_fwd,
    fake=_fake_add_fwd,
)
# Writes y into out; the result is the sum, or empty without a residual.
OUT_FORWARD = MutatingOp(
    "rms_norm_out(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset, Tensor(a!) out) -> Tensor",
    launch=_launch_out,
    reference=_reference_out,
    fake=_fake_out,
)
BACKWARD = TorchOp(
    "rms_norm_bwd(Tensor dy, Tensor h, Tensor? weight, Tensor? dsum, float eps, float offset, bool weight_grad)"
    " -> (Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
# Writes the gradient over h; the result is that of the weight, or empty.
BACKWARD_OVER = MutatingOp(
    "rms_norm_bwd_over(Tensor dy, Tensor(a!) h, Tensor? weight, Tensor? dsum, float eps, float offset,"
    " bool weight_grad) -> Tensor",
    launch=_launch_bwd_over,
    reference=_reference_bwd_over,
    fake=lambda *args: _fake_bwd(*args)[1],
)

shard_rows(FORWARD, ("x",))
shard_rows(ADD_FORWARD, ("x", "residual"))
shard_rows(BACKWARD, ("dy", "h", "dsum"), sums=1)

_again, _forward = FORWARD.again, FORWARD.call
BACKWARDS[False] = BACKWARD


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps, offset, overwrites):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.overwrites = eps, offset, overwrites
        if residual is None:
            ctx.save_for_backward(x, weight)
            return FORWARD(x, weight, eps, offset)
        y, total = ADD_FORWARD(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum=None):
        if dy is None:
            return dsum, None, dsum, None, None, None
        if ctx.overwrites:
            overwrite_once(ctx, "rms_norm", (dy, dsum))
        h, weight = ctx.saved_tensors
        weight_grad = ctx.needs_input_grad[1]
        if ctx.overwrites and not may_overlap(dy, h) and (dsum is None or not may_overlap(dsum, h)):
            (dh,) = detached(h)
            dweight = BACKWARD_OVER(dy, dh, weight, dsum, ctx.eps, ctx.offset, weight_grad)
        else:
            dh, dweight = BACKWARD(dy, h, weight, dsum, ctx.eps, ctx.offset, weight_grad)
        return dh, dweight if weight_grad else None, dh if ctx.needs_input_grad[2] else None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: Tensor | None = None,
    rstd: Tensor | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
    reuse: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Normalise the last dimension by its root mean square.

    ``y = h / sqrt(mean(h^2) + eps) * (offset + weight)`` with ``h = x``, or ``h = x + residual`` rounded to the dtype
    of x. Computed in fp32 and rounded once. Differentiable once in x, weight and residual.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride and
            evenly spaced). May be any object with ``__dlpack__``; the result is then of its kind.
        weight: ``[n]`` of x's dtype or float32; None for ones (then `offset` is not used).
        eps: Added to the mean square.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Same shape and dtype as x.
        rstd: float32, x's shape without the last dimension: ``1 / sqrt(mean(x^2) + eps)`` of an earlier call, which is
            not worked out again. Not with a residual (give the sum as x). Gradients are those of the whole
            normalisation, as if it had been worked out.
        return_rstd: Return rstd too (last); it has no gradient.
        out: Takes y instead of new memory: x's shape, dtype and device, any strides (a copy is made unless it is
            dense). May be x or residual itself, must not overlap an input otherwise. Not recorded by autograd: an error
            if a gradient is needed. Not with rstd or return_rstd.
        reuse: ``"inputs"``: the backward pass writes the gradient over what it has saved, x or with a residual the sum
            that was returned, which then holds it, instead of taking new memory. The rules are those of :func:`glu`.
            Not with rstd, return_rstd or out.

    Returns:
        ``y``, dense unless it is `out`, of x's shape and dtype; with a residual ``(y, h)``; with return_rstd
        ``(y, rstd)`` or ``(y, h, rstd)``.
    """
    if not isinstance(x, Tensor):
        more = {"rstd": rstd, "return_rstd": return_rstd, "out": out, "reuse": reuse}
        return interop.call(rms_norm, x, weight, eps=eps, offset=offset, residual=residual, **more)
    overwrites = False
    if reuse is not None:
        if rstd is not None or return_rstd or out is not None:
            raise ArgumentError("reuse goes without rstd, return_rstd and out")
        # With a residual, what is saved and overwritten is the sum made here.
        overwrites = may_overwrite(reuse, {"x": x} if residual is None else {}, (weight,))
    if residual is None and out is None and rstd is None and not return_rstd:
        y = _again(x, weight, eps, offset)
        if y is not None:
            return y
    if out is not None:
        if rstd is not None or return_rstd:
            raise ArgumentError("out goes without rstd and return_rstd")
        check_no_gradient(out, x, weight, residual)
        total = OUT_FORWARD(x, residual, weight, eps, offset, out)
        return out if residual is None else (out, total)
    if rstd is not None or return_rstd:
        return with_statistics(x, weight, None, residual, rstd, None, eps, offset, False, return_rstd)
    if is_grad_enabled() and needs_grad(x, weight, residual):
        if is_dynamo_compiling():
            eps, offset = constant(eps), constant(offset)
        return _RmsNorm.apply(x, weight, residual, eps, offset, overwrites)
    if residual is None:
        return _forward(x, weight, eps, offset)
    return ADD_FORWARD(x, residual, weight, eps, offset)


OP = Op(
    "rms_norm",
    public=("rms_norm",),
    kernels=KERNELS,
    torch_ops=(FORWARD, ADD_FORWARD, OUT_FORWARD, BACKWARD, BACKWARD_OVER),
)
