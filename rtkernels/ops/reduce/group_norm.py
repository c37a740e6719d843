"""Normalisation of groups of channels, with an optional silu, and its backward."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce import group_norm_plan
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_shape, token
from rtkernels.runtime.layout import check_same, nothing
from rtkernels.runtime.operator.arguments import Among, check_integer
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

_ACTS = (None, "silu")
_WHY_NOT_INVARIANT = "the number of groups in the batch decides how their statistics are added"


def _check(x: Meta, weight: Meta | None, bias: Meta | None, groups: int) -> None:
    if len(x.shape) < 2:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected [batch, channels, ...]")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ArgumentError(f"groups is {groups}; expected a divisor of {channels}, the number of channels")
    cols = channels // groups
    for size in x.shape[2:]:
        cols *= size
    if cols >= 2**31:
        raise ArgumentError(f"x has {cols} elements in a group; expected fewer than 2^31")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_shape(name, parameter.shape, (channels,), "one number for each channel")
            token(name, parameter.dtype, dict.fromkeys((x.dtype, torch.float32)))
    if weight is not None and bias is not None:
        check_same("bias", bias.dtype, weight.dtype, "dtype", of="weight")


def _check_bwd(x: Meta, weight: Meta | None, bias: Meta | None, mean: Meta, rstd: Meta, groups: int) -> None:
    _check(x, weight, bias, groups)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        token(name, statistic.dtype, (torch.float32,))
        check_shape(name, statistic.shape, (x.shape[0], groups))


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _grouped(t: Tensor, groups: int) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32)).reshape(t.shape[0], groups, t.shape[1] // groups, -1)


def _parameter(t: Tensor | None, x: Tensor, groups: int, otherwise: float) -> Tensor:
    wider = torch.promote_types(x.dtype, torch.float32)
    if t is None:
        return torch.full((), otherwise, dtype=wider, device=x.device)
    return t.to(wider).view(1, groups, -1, 1)


def _reference_fwd(x, weight, bias, groups, eps, act):
    if x.numel() == 0:
        empty = torch.zeros((x.shape[0], groups), dtype=torch.float32, device=x.device)
        return x.new_empty(x.shape), empty, empty.clone()
    v = _grouped(x, groups)
    variance, mean = torch.var_mean(v, (2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (v - mean) * rstd * _parameter(weight, x, groups, 1.0) + _parameter(bias, x, groups, 0.0)
    if act:
        y = torch.nn.functional.silu(y)
    return y.reshape(x.shape).to(x.dtype).contiguous(), mean.view(-1, groups).float(), rstd.view(-1, groups).float()


def _reference_bwd(dy, x, weight, bias, mean, rstd, groups, act, need_x, need_weight, need_bias):
    if x.numel() == 0:
        needed = (x, need_x), (weight, need_weight), (bias, need_bias)
        return tuple(t.new_zeros(t.shape) if need else nothing(x) for t, need in needed)
    w, shape = _parameter(weight, x, groups, 1.0), (x.shape[0], groups, 1, 1)
    center, inverse = (t.to(w.dtype).view(shape) for t in (mean, rstd))
    g, z = _grouped(dy, groups), (_grouped(x, groups) - center) * inverse
    if act:
        u = z * w + _parameter(bias, x, groups, 0.0)
        s = torch.sigmoid(u)
        g = g * s * (1 + u * (1 - s))
    dx, dweight, dbias = nothing(x), nothing(x), nothing(x)
    if need_x:
        h = g * w
        dx = inverse * (h - h.mean((2, 3), keepdim=True) - z * (h * z).mean((2, 3), keepdim=True))
        dx = dx.reshape(x.shape).to(x.dtype).contiguous()
    if need_weight:
        dweight = (g * z).sum((0, 3)).reshape(-1).to(weight.dtype)
    if need_bias:
        dbias = g.sum((0, 3)).reshape(-1).to(bias.dtype)
    return dx, dweight, dbias


# ---- operators ------------------------------------------------------------------------------------------------------


def _planes(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], -1)


def _forward(x, weight, bias, groups, eps, act):
    y, mean, rstd = group_norm_plan.normalize(_planes(x), weight, bias, groups, eps, act, torch.float32)
    return y.view(x.shape), mean, rstd


def _backward(dy, x, weight, bias, mean, rstd, groups, act, need_x, need_weight, need_bias):
    wanted = need_x, need_weight or need_bias
    given = _planes(dy), _planes(x), weight, bias, mean, rstd
    dx, parameters = group_norm_plan.gradients(*given, groups, wanted, act)
    dweight, dbias = parameters or (None, None)
    return (
        dx.view(x.shape) if need_x else nothing(x), dweight if need_weight else nothing(x),
        dbias if need_bias else nothing(x),
    )  # fmt: skip


_INPUTS = Dense("x"), Dense("weight", None, optional=True), Dense("bias", None, optional=True)
FORWARD = Operator(
    "group_norm_fwd", _INPUTS, options="int groups, float eps, bool act", numbers="eps", results="y mean rstd",
    outputs=lambda x, groups: (Memory.like(x), *[Memory((x.shape[0], groups), torch.float32)] * 2),
    plan=lambda: Steps(instead=_forward), reference=_reference_fwd, check=_check,
    not_invariant=(1, _WHY_NOT_INVARIANT),
)  # fmt: skip
BACKWARD = Operator(
    "group_norm_bwd", (Dense("dy", like="x"), *_INPUTS, Dense("mean", None), Dense("rstd", None)),
    options="int groups, bool act, bool need_x, bool need_weight, bool need_bias", results="dx dweight dbias",
    outputs=lambda x, weight, bias, need_x, need_weight, need_bias: (
        Memory.like(x) if need_x else None, Memory.like(weight) if need_weight else None,
        Memory.like(bias) if need_bias else None,
    ),
    plan=lambda: Steps(instead=_backward), reference=_reference_bwd, check=_check_bwd,
    not_invariant=(1, _WHY_NOT_INVARIANT),
)  # fmt: skip


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, groups, eps, act):
        ctx.set_materialize_grads(False)
        y, mean, rstd = FORWARD.call(x, weight, bias, groups, eps, act)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.options = groups, act
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 6
        needs = ctx.needs_input_grad[:3]
        grads = BACKWARD.call(dy, *ctx.saved_tensors, *ctx.options, *needs)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None, None


_differentiable = applied(_GroupNorm)


@public(options={"act": Among(_ACTS, "None or 'silu'")})
def group_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, groups: int, eps: float | None = None,
    act: Literal["silu"] | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Normalise groups of channels to mean 0 and variance 1, and apply silu on request.

    ``y = act((x - mean) / sqrt(var + eps) * weight + bias)``, with the mean and variance of a group of consecutive
    channels of one batch entry, and weight and bias by channel. Computed in fp32 and rounded once; the variance is
    computed from the differences to the mean, so a large mean costs no precision. Differentiable once in x, weight and
    bias. ``groups=1`` is a layer norm of each batch entry, as many groups as channels an instance norm.

    Args:
        x: ``[batch, channels, ...]``, bfloat16, float16 or float32; any strides (copied unless contiguous). Any object
            with ``__dlpack__`` is accepted; results are then of the same kind.
        weight: ``[channels]`` in x's dtype or float32. Default: ones.
        bias: ``[channels]`` in the weight's dtype, or, without one, in x's dtype or float32. Default: zeros.
        groups: Number of groups of consecutive channels; any divisor of the number of channels.
        eps: Added to the variance. Default: 1e-5.
        act: ``"silu"`` for ``y * sigmoid(y)``, as the residual blocks of diffusion models have it. Default: none.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        ``y``, contiguous, in x's shape and dtype.
    """
    if eps is None:  # as a default value it would become symbolic under torch.compile(dynamic=True)
        eps = 1e-5
    groups, silu = check_integer("groups", groups), act is not None
    if is_grad_enabled() and needs_grad(x, weight, bias):
        return _differentiable(x, weight, bias, groups, eps, silu)
    return FORWARD.call(x, weight, bias, groups, eps, silu)[0]


OP = Op(
    "group_norm", public=("group_norm",), kernels=group_norm_plan.KERNELS, torch_ops=(FORWARD, BACKWARD),
    uses=("reduction",),
)  # fmt: skip
