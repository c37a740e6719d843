"""Steps of a sampler: an Euler step, and the combination of two velocities (classifier-free guidance)."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.combine import combine
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.layout import check_same, token
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable


def _factor(name: str, value: Tensor | float) -> tuple[Tensor | None, float]:
    """Return a number as one element on the device and a number to multiply it with."""
    if not isinstance(value, Tensor):
        return None, float(check_number(name, value))
    if value.dtype != torch.float32 or value.numel() != 1:
        raise ArgumentError(f"{name} is {value.dtype} {tuple(value.shape)}; expected a number or one float32 element")
    return value.detach().reshape(1), 1.0


def _check(name: str, t: Tensor, like: Tensor, of: str) -> None:
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{name} is a {type(t).__name__}; expected a torch.Tensor")
    token(of, like.dtype)
    if t.dtype != like.dtype and torch.float32 not in (t.dtype, like.dtype):
        raise ArgumentError(f"{name} has dtype {t.dtype}; expected {like.dtype}, that of {of}, or float32")
    check_same(name, t.shape, like.shape, "shape", of=of)


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [t if t.dim() else t.reshape(1) for t in tensors]


def _scaled(dy: Tensor, factor: Tensor | None, alpha: float, dtype: torch.dtype) -> Tensor:
    (rows,) = _flat(dy)
    narrow = torch.float32 in (dtype, rows.dtype)
    result = torch.empty(rows.shape, dtype=dtype if narrow else rows.dtype, device=rows.device)
    if dtype != torch.float32 == rows.dtype:  # the gradient of a narrow tensor from an fp32 one
        result = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    return combine(rows, result, factor=factor, alpha=alpha).to(dtype).reshape(dy.shape)


def _step(x: Tensor, v: Tensor, factor: Tensor | None, alpha: float) -> Tensor:
    x, v = detached(x, v)
    out = new_tensor(tuple(x.shape), x.dtype, x)
    base, rows, to = _flat(x, v, out)
    combine(rows, to, base0=base, factor=factor, alpha=alpha)
    return out


class _Euler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v, factor, alpha):
        ctx.save_for_backward(factor)
        ctx.alpha, ctx.dtype = alpha, v.dtype
        return _step(x, v, factor, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (factor,) = ctx.saved_tensors
        dv = _scaled(dy, factor, ctx.alpha, ctx.dtype) if ctx.needs_input_grad[1] else None
        return dy, dv, None, None


_step_differentiable = applied(_Euler)


@public(over="x v")
def euler_step(x: Tensor, v: Tensor, dt: Tensor | float, *, out: Tensor | None = None) -> Tensor:
    """Return ``x + dt * v``.

    Computed in fp32 and rounded once. Differentiable once in x and v.

    Args:
        x: Any shape; bfloat16, float16 or float32, any strides (copied unless rows are unit-stride and evenly spaced).
        v: A tensor of x's shape, in x's dtype; alternatively one of the two is float32. To skip leading rows, slice it.
        dt: A number, or one float32 element on the device, which the host never reads: a captured graph reads its
            current value at each replay. It has no gradient.
        out: Tensor to write the result to, of x's shape and dtype. May be x or v. Not with gradients.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    _check("v", v, x, "x")
    factor, alpha = _factor("dt", dt)
    if is_grad_enabled() and needs_grad(x, v):
        return _step_differentiable(x, v, factor, alpha)
    return _step(x, v, factor, alpha)


def _guided(r, v_cond, v_uncond, factor, alpha):
    r, v_cond, v_uncond = detached(r, v_cond, v_uncond)
    out = new_tensor(tuple(r.shape), r.dtype, r)
    base, cond, uncond, to = _flat(r, v_cond, v_uncond, out)
    combine(cond, to, add0=uncond, subtract=True, base0=base, base1=uncond, factor=factor, alpha=alpha)
    return out


class _Guided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, v_cond, v_uncond, factor, alpha):
        ctx.save_for_backward(factor)
        ctx.alpha, ctx.dtypes = alpha, (v_cond.dtype, v_uncond.dtype)
        return _guided(r, v_cond, v_uncond, factor, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        wanted, (factor,), alpha = ctx.needs_input_grad, ctx.saved_tensors, ctx.alpha
        dcond = _scaled(dy, factor, alpha, ctx.dtypes[0]) if wanted[1] else None
        duncond = None
        if wanted[2]:
            (rows,) = _flat(dy)
            result = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            duncond = combine(rows, result, base0=rows, factor=factor, alpha=-alpha).to(ctx.dtypes[1]).reshape(dy.shape)
        return dy, dcond, duncond, None, None


_guided_differentiable = applied(_Guided)


@public(over="r v_cond v_uncond")
def cfg_combine(
    r: Tensor, v_cond: Tensor, v_uncond: Tensor, beta: Tensor | float, *, out: Tensor | None = None
) -> Tensor:
    """Return ``r + v_uncond + beta * (v_cond - v_uncond)``, classifier-free guidance added to a residual.

    Computed in fp32 and rounded once. Differentiable once in r, v_cond and v_uncond.

    Args:
        r: Any shape; bfloat16, float16 or float32, any strides, as for :func:`euler_step`.
        v_cond: A tensor of r's shape, in r's dtype; alternatively one of the two is float32.
        v_uncond: Like v_cond.
        beta: A number, or one float32 element on the device, which the host never reads. It has no gradient.
        out: Tensor to write the result to, of r's shape and dtype. May be r, v_cond or v_uncond. Not
            with gradients.

    Returns:
        A contiguous tensor of r's shape and dtype.
    """
    _check("v_cond", v_cond, r, "r")
    _check("v_uncond", v_uncond, r, "r")
    factor, alpha = _factor("beta", beta)
    if is_grad_enabled() and needs_grad(r, v_cond, v_uncond):
        return _guided_differentiable(r, v_cond, v_uncond, factor, alpha)
    return _guided(r, v_cond, v_uncond, factor, alpha)
