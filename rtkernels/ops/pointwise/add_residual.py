"""Sums and products around matrix products: residual, bias, position table, factor of a channel."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.combine import combine
from rtkernels.ops.shared.row_operands import rows_of, summed
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import FLOAT_DTYPES, check_dimensions
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.layout import as_rows, check_same, row_count, token
from rtkernels.runtime.operator.arguments import Matching, Within
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op

# ---- add_residual ---------------------------------------------------------------------------------------------------


def _new(x: Tensor) -> Tensor:
    return new_tensor(tuple(x.shape), x.dtype, x)


def _add(residual: Tensor, x: Tensor, gate: Tensor | None, bias: Tensor | None) -> Tensor:
    residual, x, gate, bias = detached(residual, x, gate, bias)
    gates, cyclic = rows_of("gate", gate, x.shape)
    out = new_tensor(tuple(x.shape), residual.dtype, x)
    return combine(x, out, add0=_bias_row(bias, x), mul0=gates, base0=residual, cyclic="mul0" if cyclic else "")


def _bias_row(bias: Tensor | None, x: Tensor) -> Tensor | None:
    if bias is None:
        return None
    if tuple(bias.shape) != (x.shape[-1],):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; expected ({x.shape[-1]},), a row of x")
    return bias.reshape(1, -1)


class _AddResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, gate, bias):
        ctx.save_for_backward(x, gate, bias)
        return _add(residual, x, gate, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gate, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx = dgate = dbias = None
        gates, cyclic = rows_of("gate", gate, x.shape)
        if wanted[1] or wanted[3]:
            dx = dy if gate is None else combine(dy, _new(x), mul0=gates, cyclic="mul0" if cyclic else "")
            dbias = summed(dx, bias) if wanted[3] else None
        if wanted[2]:
            full = combine(x, _new(x), add0=_bias_row(bias, x), mul0=dy)
            dgate = summed(full, gate)
        return dy, dx if wanted[1] else None, dgate, dbias


_add_differentiable = applied(_AddResidual)


@public(over="residual x")
def add_residual(
    residual: Tensor, x: Tensor, *, gate: Tensor | None = None, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``residual + gate * (x + bias)``.

    Computed in fp32 and rounded once. Differentiable once in all four tensors.

    Args:
        residual: ``[..., n]``, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly
            spaced). Any object with ``__dlpack__`` is accepted.
        x: Like residual.
        gate: A tensor that broadcasts to x's shape and has all its columns, such as ``[n]``; any row stride, x's dtype
            or float32. Default: 1.
        bias: ``[n]`` in x's dtype or float32. Default: 0.
        out: Tensor to write the result to, of residual's shape and dtype. May be residual or x. Not with
            gradients.

    Returns:
        A contiguous tensor of residual's shape and dtype.
    """
    _check_pair("x", x, residual, "residual")
    if is_grad_enabled() and (needs_grad(residual, x) or needs_grad(x, gate, bias)):
        return _add_differentiable(residual, x, gate, bias)
    return _add(residual, x, gate, bias)


def _check_pair(name: str, x: Tensor, other: Tensor, of: str) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
    token(of, other.dtype)
    check_same(name, x.dtype, other.dtype, "dtype", of=of)
    check_same(name, x.shape, other.shape, "shape", of=of)
    check_dimensions(of, x.shape)


# ---- add_bias -------------------------------------------------------------------------------------------------------


def _biased(x: Tensor, bias: Tensor, pos: Tensor | None) -> Tensor:
    x, bias, pos = detached(x, bias, pos)
    return combine(x, _new(x), add0=_bias_row(bias, x), add1=pos, cyclic="add1" if pos is not None else "")


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, pos):
        ctx.save_for_backward(bias, pos)
        return _biased(x, bias, pos)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        bias, pos = ctx.saved_tensors
        dpos = None
        if ctx.needs_input_grad[2]:
            rows, period = row_count(dy.shape), pos.shape[0]
            padded = torch.nn.functional.pad(as_rows(dy), (0, 0, 0, -rows % period))
            padded = padded.view(padded.shape[0] // period, period, dy.shape[-1])
            dpos = padded.sum(0, dtype=torch.float32).to(pos.dtype)
        return dy, summed(dy, bias) if ctx.needs_input_grad[1] else None, dpos


_biased_differentiable = applied(_AddBias)


@public(over="x", options={"x": Matching(FLOAT_DTYPES, "x.dim()"), "period": Within("int")})
def add_bias(
    x: Tensor, bias: Tensor, *, pos: Tensor | None = None, period: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``x + bias``, and with a position table ``x[i] + bias + pos[i % period]`` for row i.

    Computed in fp32 and rounded once. Differentiable once in all tensors.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides, as for :func:`add_residual`.
        bias: ``[n]`` of x's dtype or float32.
        pos: ``[positions, n]`` of x's dtype or float32.
        period: Number of rows of pos after which they repeat. Default: all of them.
        out: Tensor to write the result to, of x's shape and dtype. May be x. Not with gradients.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    _bias_row(bias, x)
    if pos is not None:
        if pos.dim() != 2 or pos.shape[-1] != x.shape[-1] or not pos.shape[0]:
            raise ArgumentError(f"pos has shape {tuple(pos.shape)}; expected [positions, {x.shape[-1]}]")
        if period is not None:
            if not 0 < period <= pos.shape[0]:
                raise ArgumentError(f"period is {period}; expected 1 to {pos.shape[0]}, the rows of pos")
            pos = pos[:period]
    elif period is not None:
        raise ArgumentError("period is given; expected None without pos")
    if is_grad_enabled() and needs_grad(x, bias, pos):
        return _biased_differentiable(x, bias, pos)
    return _biased(x, bias, pos)


# ---- channel_mul ----------------------------------------------------------------------------------------------------


def _multiplied(x: Tensor, s: Tensor) -> Tensor:
    x, s = detached(x, s)
    return combine(x, _new(x), mul0=s.reshape(1, -1))


class _ChannelMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return _multiplied(x, s)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        dx = _multiplied(dy, s) if ctx.needs_input_grad[0] else None
        return dx, summed(combine(x, _new(x), mul0=dy), s) if ctx.needs_input_grad[1] else None


_multiplied_differentiable = applied(_ChannelMul)


@public(over="x", options={"x": Matching(FLOAT_DTYPES)})
def channel_mul(x: Tensor, s: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``x * s``, with one factor per column.

    Computed in fp32 and rounded once. Differentiable once in both.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides, as for :func:`add_residual`.
        s: ``[n]`` of x's dtype or float32.
        out: Tensor to write the result to, of x's shape and dtype. May be x. Not with gradients.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    if not x.dim() or not isinstance(s, Tensor) or tuple(s.shape) != (x.shape[-1],):
        came = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
        raise ArgumentError(f"s has shape {came}; expected ({x.shape[-1] if x.dim() else 'n'},), a row of x")
    if is_grad_enabled() and needs_grad(x, s):
        return _multiplied_differentiable(x, s)
    return _multiplied(x, s)


OP = Op(
    "add_residual", public=("add_residual", "add_bias", "channel_mul", "euler_step", "cfg_combine"), kernels=(),
    torch_ops=(), uses=("combine",),
)  # fmt: skip
