"""Layer normalisation over the last dimension, with optional residual addition, and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.layer_norm_plan import BWD_PLANS, FWD_PLANS, KERNELS, ForwardPlan, check
from rtkernels.ops.norm.reference import (
    check_bwd,
    parameter_sums,
    reference_add_fwd,
    reference_bwd,
    reference_fwd,
    reference_out,
)
from rtkernels.ops.norm.statistics import BACKWARDS, check_no_gradient, check_out, check_over, with_statistics
from rtkernels.runtime.layout import address, may_overlap, metadata, nothing, rowed
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
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    out: Tensor | None = None,
) -> ForwardPlan | None:
    align = (x.data_ptr() | address(residual) | address(weight) | address(bias) | address(out)) & 15
    return FWD_PLANS[metadata(x), metadata(weight), metadata(bias), metadata(residual), align, eps, offset]


def _plan_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> ForwardPlan | None:
    return _plan(x, None, weight, bias, eps, offset)


def _copied(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> tuple[Any, ...]:
    return rowed(x), _dense(weight), _dense(bias), eps, offset


def _launch_add_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float):
    plan = _plan(x, residual, weight, bias, eps, offset)
    if plan is None:
        return _launch_add_fwd(rowed(x), rowed(residual), _dense(weight), _dense(bias), eps, offset)
    y, total = plan.allocate(*plan.layout), plan.allocate(*plan.layout)
    if plan.launch is not None:
        inputs = x.data_ptr(), residual.data_ptr(), address(weight), address(bias)
        plan.launch(*inputs, y.data_ptr(), total.data_ptr())
    return y, total


def _launch_out(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    out: Tensor,
) -> Tensor:
    check(metadata(x), metadata(weight), metadata(bias), metadata(residual))
    check_out(out, x, residual, weight, bias)
    if not out.is_contiguous():
        if residual is None:
            made, total = FORWARD.launch(x, weight, bias, eps, offset), nothing(x)
        else:
            made, total = _launch_add_fwd(x, residual, weight, bias, eps, offset)
        out.copy_(made)
        return total
    x, residual, weight, bias = rowed(x), rowed(residual), _dense(weight), _dense(bias)
    plan = _plan(x, residual, weight, bias, eps, offset, out)
    total = nothing(x) if residual is None else plan.allocate(*plan.layout)
    if plan.launch is not None:
        inputs = x.data_ptr(), address(residual), address(weight), address(bias)
        plan.launch(*inputs, out.data_ptr(), 0 if residual is None else total.data_ptr())
    return total


def _launch_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dsum: Tensor | None,
    eps: float,
    offset: float,
    parameter_grad: bool,
    over: bool = False,
):
    check_bwd(dy, h, weight, bias, dsum, parameter_grad)
    sums, dtype = parameter_sums(weight, bias, parameter_grad)
    if h.numel() == 0:
        return torch.empty(h.shape, dtype=h.dtype, device=h.device), (
            torch.zeros(sums, h.shape[-1], dtype=dtype, device=h.device) if sums else nothing(h)
        )
    dy, h, weight, dsum = rowed(dy), rowed(h), _dense(weight), rowed(dsum)
    align = (dy.data_ptr() | h.data_ptr() | address(weight) | address(dsum)) & 15
    plan = BWD_PLANS[metadata(dy), metadata(h), metadata(weight), metadata(dsum), align, sums]
    return plan.run(dy, h, weight, dsum, eps, offset, dtype, over)


def _launch_bwd_over(dy, h, weight, bias, dsum, eps, offset, parameter_grad) -> Tensor:
    check_over(h, dy, weight, dsum)
    dh, gradients = _launch_bwd(dy, h, weight, bias, dsum, eps, offset, parameter_grad, over=True)
    if dh is not h:
        h.copy_(dh)
    return gradients


def _reference_bwd_over(dy, h, weight, bias, dsum, eps, offset, parameter_grad) -> Tensor:
    check_over(h, dy, weight, dsum)
    dh, gradients = reference_bwd(dy, h, weight, bias, dsum, eps, offset, parameter_grad)
    h.copy_(dh)
    return gradients


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


# ---- fake results and operators --------------------------------------------------------------------------------------


def _fake_fwd(x, weight, bias, eps, offset):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add_fwd(x, residual, weight, bias, eps, offset):
    return _fake_fwd(x, weight, bias, eps, offset), _fake_fwd(x, weight, bias, eps, offset)


def _fake_out(x, residual, weight, bias, eps, offset, out):
    return nothing(x) if residual is None else _fake_fwd(x, weight, bias, eps, offset)


def _fake_bwd(dy, h, weight, bias, dsum, eps, offset, parameter_grad):
    sums, dtype = parameter_sums(weight, bias, parameter_grad)
    gradients = h.new_empty(sums, h.shape[-1], dtype=dtype) if sums else nothing(h)
    return _fake_fwd(h, weight, bias, eps, offset), gradients


FORWARD = TorchOp(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset) -> Tensor",
    plan=_plan_fwd,
    copied=_copied,
    reference=reference_fwd,
    fake=_fake_fwd,
)
ADD_FORWARD = TorchOp(
    "add_layer_norm_fwd(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset)"
    " -> (Tensor, Tensor)",
    launch=_launch_add_fwd,
    reference=reference_add_fwd,
    fake=_fake_add_fwd,
)
# Writes y into out; the result is the sum, or empty without a residual.
OUT_FORWARD = MutatingOp(
    "layer_norm_out(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float offset, Tensor(a!) out)"
    " -> Tensor",
    launch=_launch_out,
    reference=reference_out,
    fake=_fake_out,
)
# The second result is [1, n] (dweight), [2, n] (dweight and dbias) or empty; bias says only that dbias is wanted.
BACKWARD = TorchOp(
    "layer_norm_bwd(Tensor dy, Tensor h, Tensor? weight, Tensor? bias, Tensor? dsum, float eps, float offset,"
    " bool parameter_grad) -> (Tensor, Tensor)",
    launch=_launch_bwd,
    reference=reference_bwd,
    fake=_fake_bwd,
)
# Writes the gradient over h; the result is the second one of layer_norm_bwd.
BACKWARD_OVER = MutatingOp(
    "layer_norm_bwd_over(Tensor dy, Tensor(a!) h, Tensor? weight, Tensor? bias, Tensor? dsum, float eps, float offset,"
    " bool parameter_grad) -> Tensor",
    launch=_launch_bwd_over,
    reference=_reference_bwd_over,
    fake=lambda *args: _fake_bwd(*args)[1],
)

shard_rows(FORWARD, ("x",))
shard_rows(ADD_FORWARD, ("x", "residual"))
shard_rows(BACKWARD, ("dy", "h", "dsum"), sums=1)

_again, _forward = FORWARD.again, FORWARD.call
BACKWARDS[True] = BACKWARD


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps, offset, overwrites):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.overwrites = eps, offset, overwrites
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
            return dsum, None, None, dsum, None, None, None
        if ctx.overwrites:
            overwrite_once(ctx, "layer_norm", (dy, dsum))
        h, weight, bias = ctx.saved_tensors
        want_weight, want_bias, want_residual = ctx.needs_input_grad[1:4]
        rest = weight, bias if want_bias else None, dsum, ctx.eps, ctx.offset, want_weight or want_bias
        if ctx.overwrites and not may_overlap(dy, h) and (dsum is None or not may_overlap(dsum, h)):
            (dh,) = detached(h)
            gradients = BACKWARD_OVER(dy, dh, *rest)
        else:
            dh, gradients = BACKWARD(dy, h, *rest)
        dweight = gradients[0] if want_weight else None
        dbias = gradients[1] if want_bias else None
        return dh, dweight, dbias, dh if want_residual else None, None, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
    residual: Tensor | None = None,
    rstd: Tensor | None = None,
    mean: Tensor | None = None,
    return_statistics: bool = False,
    out: Tensor | None = None,
    reuse: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Normalise the last dimension to mean 0 and variance 1.

    ``y = (h - mean(h)) / sqrt(var(h) + eps) * (offset + weight) + bias`` with ``h = x``, or ``h = x + residual``
    rounded to the dtype of x. Computed in fp32 and rounded once; the variance is that of the differences from the mean,
    so a mean far from zero costs no digits. Differentiable once in x, weight, bias and residual.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride and
            evenly spaced). May be any object with ``__dlpack__``; the result is then of its kind.
        weight: ``[n]`` of x's dtype or float32; None for ones (then `offset` is not used).
        bias: ``[n]`` of x's dtype or float32, the same as the weight's; None for zeros.
        eps: Added to the variance.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Same shape and dtype as x.
        rstd: float32, x's shape without the last dimension: ``1 / sqrt(var(x) + eps)`` of an earlier call, which is not
            worked out again; with `mean`. Not with a residual (give the sum as x). Gradients are those of the whole
            normalisation, as if both had been worked out.
        mean: float32, as rstd: ``mean(x)``.
        return_statistics: Return rstd and mean too (last); they have no gradient.
        out: Takes y instead of new memory: x's shape, dtype and device, any strides (a copy is made unless it is
            dense). May be x or residual itself, must not overlap an input otherwise. Not recorded by autograd: an error
            if a gradient is needed. Not with given or returned statistics.
        reuse: ``"inputs"``: the backward pass writes the gradient over what it has saved, x or with a residual the sum
            that was returned, which then holds it, instead of taking new memory. The rules are those of :func:`glu`.
            Not with statistics or out.

    Returns:
        ``y``, dense unless it is `out`, of x's shape and dtype; with a residual ``(y, h)``; with return_statistics
        ``(y, rstd, mean)`` or ``(y, h, rstd, mean)``.
    """
    if not isinstance(x, Tensor):
        more = {"rstd": rstd, "mean": mean, "return_statistics": return_statistics, "out": out, "reuse": reuse}
        return interop.call(layer_norm, x, weight, bias, eps=eps, offset=offset, residual=residual, **more)
    overwrites = False
    if reuse is not None:
        if rstd is not None or mean is not None or return_statistics or out is not None:
            raise ArgumentError("reuse goes without rstd, mean, return_statistics and out")
        # With a residual, what is saved and overwritten is the sum made here.
        overwrites = may_overwrite(reuse, {"x": x} if residual is None else {}, (weight, bias))
    if residual is None and out is None and rstd is None and mean is None and not return_statistics:
        y = _again(x, weight, bias, eps, offset)
        if y is not None:
            return y
    if out is not None:
        if rstd is not None or mean is not None or return_statistics:
            raise ArgumentError("out goes without rstd, mean and return_statistics")
        check_no_gradient(out, x, weight, bias, residual)
        total = OUT_FORWARD(x, residual, weight, bias, eps, offset, out)
        return out if residual is None else (out, total)
    if rstd is not None or mean is not None or return_statistics:
        return with_statistics(x, weight, bias, residual, rstd, mean, eps, offset, True, return_statistics)
    if is_grad_enabled() and (needs_grad(x, weight, bias) or needs_grad(x, residual)):
        if is_dynamo_compiling():
            eps, offset = constant(eps), constant(offset)
        return _LayerNorm.apply(x, weight, bias, residual, eps, offset, overwrites)
    if residual is None:
        return _forward(x, weight, bias, eps, offset)
    return ADD_FORWARD(x, residual, weight, bias, eps, offset)


OP = Op(
    "layer_norm",
    public=("layer_norm",),
    kernels=KERNELS,
    torch_ops=(FORWARD, ADD_FORWARD, OUT_FORWARD, BACKWARD, BACKWARD_OVER),
)
