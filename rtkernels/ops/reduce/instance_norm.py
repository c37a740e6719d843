"""``instance_norm`` by the name and argument order of FlagGems: a batch norm in which every plane is a channel."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce import batch_norm
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.declared import Primitive


def _of_planes(values: Tensor | None, batch: int) -> Tensor | None:
    return None if values is None else values.repeat(batch)


class _InstanceNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, running, own, momentum, eps):
        batch, channels, spatial = x.shape
        planes = [_of_planes(t, batch) for t in (weight, bias, *running)]
        x = x.contiguous().view(1, batch * channels, spatial)
        y, mean, rstd = batch_norm.batch_norm(x, *planes, own, momentum, eps)
        if own:  # of the planes' running statistics, each moved by its own batch entry
            for kept, moved in zip(running, planes[2:], strict=True):
                if kept is not None:
                    kept.copy_(moved.view(batch, channels).float().mean(0))
        else:
            mean, rstd = planes[2].float(), (planes[3].float() + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.own, ctx.shape, ctx.biased = own, (batch, channels, spatial), bias
        return y.view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        batch, channels, _ = ctx.shape
        wanted = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        dx, sums = batch_norm.batch_norm_grads(
            dy.contiguous().view(x.shape), x, _of_planes(weight, batch), mean, rstd, ctx.own, wanted
        )
        dw = db = None
        if sums is not None:
            dw, db = sums.view(2, batch, channels).sum(1).unbind()
        return (
            None if dx is None else dx.view(ctx.shape),
            dw.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            db.to(ctx.biased.dtype) if ctx.needs_input_grad[2] else None,
            None, None, None, None,
        )  # fmt: skip


def _check(name: str, given: Tensor | None, x: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """Raise for what is no vector of x's channels; return the dtype that all of them have."""
    if given is None:
        return dtype
    if not isinstance(given, Tensor) or given.shape != x.shape[1:2]:
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ArgumentError(f"{name} is {what}; expected a tensor of {x.shape[1]} channels")
    if given.dtype not in (x.dtype, torch.float32) or (dtype is not None and given.dtype != dtype):
        raise ArgumentError(f"{name} has dtype {given.dtype}; expected {dtype or f'float32 or {x.dtype}'}")
    if given.device != x.device:
        raise ArgumentError(f"{name} is on {given.device}; expected {x.device}, as input")
    return given.dtype


def instance_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, running_mean: Tensor | None = None,
    running_var: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-05,
    cudnn_enable: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise every channel of every batch entry, with gradients of input, weight and bias.

    Statistics and sums are float32, results are rounded once. The running variance gets the unbiased one, as in torch.

    Args:
        input: (batch, channels, ...); bfloat16, float16 or float32.
        weight: (channels,), float32 or of input's dtype, or None.
        bias: Like weight.
        running_mean: Like weight; updated in place if use_input_stats.
        running_var: Like running_mean.
        use_input_stats: Normalise by input's own statistics, not by the running ones.
        momentum: The share of input's statistics in the running ones.
        eps: Added to the variance.
        cudnn_enable: Accepted and ignored: cuDNN is not called.

    Returns:
        A contiguous tensor of input's shape and dtype.
    """
    if not isinstance(input, Tensor) or input.dim() < 3 or input.dtype not in FLOAT_DTYPES:
        what = f"{tuple(input.shape)} {input.dtype}" if isinstance(input, Tensor) else type(input).__name__
        raise ArgumentError(f"input is {what}; expected (batch, channels, ...), bfloat16, float16 or float32")
    dtype = None
    for name in ("weight", "bias", "running_mean", "running_var"):
        dtype = _check(name, locals()[name], input, dtype)
    if (running_mean is None) != (running_var is None):
        raise ArgumentError("one of running_mean and running_var is None; expected both, or neither")
    if running_mean is None and not use_input_stats:
        raise ArgumentError("running_mean is None; expected running statistics, which use_input_stats=False needs")
    if use_input_stats and input[0, 0].numel() == 1:
        raise ArgumentError(f"input has shape {tuple(input.shape)}; expected several elements in each channel")
    if input.numel() == 0 or not Primitive.can_launch(input):
        statistics = running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        return torch.nn.functional.instance_norm(input, *statistics)
    rows = input.reshape(*input.shape[:2], -1)
    running = running_mean, running_var
    return _InstanceNorm.apply(rows, weight, bias, running, bool(use_input_stats), momentum, eps).view(input.shape)
