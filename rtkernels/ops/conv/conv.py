"""Convolutions in one to three dimensions: which kernel takes one, and the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.conv.depthwise import DEPTHWISE, FORWARD, WINDOWS
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse, refuse_weight_gradient
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.arguments import Matching, Within, check_integer
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op

_TORCH = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, pads):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.pads = stride, pads
        return FORWARD.call(x, weight, bias, stride, *pads, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs, dx = list(ctx.needs_input_grad[:3]), None
        if needs[0] and ctx.stride == 1 and weight.shape[0] == x.shape[1]:
            dx = FORWARD.call(dy, weight, None, 1, *(weight.shape[2] - 1 - pad for pad in ctx.pads), True)
            needs[0] = False
        if needs[0] and level() >= 2:
            refuse("conv", "the gradient of its input is torch's at this stride")
        if any(needs):
            refuse_weight_gradient("conv")
            steps = [ctx.stride] * 2, list(ctx.pads), [1, 1], False, [0, 0], x.shape[1], needs
            found = torch.ops.aten.convolution_backward(dy, x, weight, [weight.shape[0]], *steps)
            dx = found[0] if needs[0] else dx
            return dx, *(t if need else None for t, need in zip(found[1:], needs[1:], strict=True)), None, None
        return dx, None, None, None, None


_depthwise = applied(_Depthwise)


def _numbers(name: str, value: Any, dims: int, minimum: int) -> tuple[int, ...]:
    """Return a number for each dimension."""
    given = tuple(value) if isinstance(value, tuple | list) and len(value) == dims else (value,) * dims
    if any(check_integer(name, each) < minimum for each in given):
        raise ArgumentError(f"{name} is {value!r}; expected a number from {minimum} up, or {dims} of them")
    return given


def _padding(
    padding: Any, kernel: Sequence[int], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    dims = len(kernel)
    if padding == "valid":
        return (0,) * dims
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        if set(stride) != {1} or any(each % 2 for each in total):
            raise ArgumentError("padding is 'same'; expected stride 1 and windows with a middle, or numbers")
        return tuple(each // 2 for each in total)
    if isinstance(padding, str):
        raise ArgumentError(f"padding is {padding!r}; expected 'same', 'valid' or numbers")
    return _numbers("padding", padding, dims, 0)


def _patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a convolution whose windows lie side by side: the product of patches, one row each, with the weight."""
    kernel = weight.shape[2:]
    dims = len(kernel)
    whole = x
    for i, k in enumerate(kernel):
        whole = whole.narrow(2 + i, 0, x.shape[2 + i] // k * k)
    for i in reversed(range(dims)):
        whole = whole.unflatten(2 + i, (-1, kernel[i]))
    places, inside = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    rows = whole.permute(0, *places, 1, *inside).flatten(1 + dims)
    y = scaled_mm(rows, weight.flatten(1), bias=bias)
    return y.movedim(-1, 1)


def _is_patches(x: Tensor, kernel: Sequence[int], stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    """Return True for windows of more than an element that lie side by side, of types that have a product."""
    if x.dtype == torch.float32 or tuple(kernel) != stride or any(padding) or max(kernel) == 1:
        return False
    return min(n // k for n, k in zip(x.shape[2:], kernel, strict=True)) > 0


def _has_kernel(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> bool:
    """Return True for depthwise convolutions that are faster here: square windows, and no channels-last tensors."""
    square = len(kernel) == 2 and len({*kernel}) == len({*stride}) == 1 and set(dilation) == {1}
    return square and (kernel[0], stride[0]) in WINDOWS and (x.stride(1) != 1 or level() > 0)


@public(tensors="weight", options={"x": Matching(FLOAT_DTYPES), "groups": Within("int")})
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | Literal["same", "valid"] = 0, dilation: int | tuple[int, ...] = 1, groups: int = 1,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a convolution in one, two or three dimensions, as ``torch.nn.functional.conv1d`` to ``conv3d``.

    Depthwise convolutions (`groups` is the number of channels) with square windows of 3, 5 or 7 elements at stride 1 or
    2 have kernels of their own, unless x is channels-last. A convolution with the stride of its window's size, without
    padding (patch embeddings), is a matrix product if x has 16 bits; its result is channels-last. All others, and the
    gradients of weights, are torch's, because cuDNN is faster. Sums are in fp32, rounded once. Differentiable in x,
    weight and bias.

    Args:
        x: ``[n, channels, ...]`` with one to three sizes; bfloat16, float16 or float32, any strides.
        weight: ``[out channels, channels / groups, ...]``, x's dtype.
        bias: ``[out channels]``, x's dtype.
        stride: Step from window to window: one number, or one per dimension.
        padding: Zeros on both sides, one number or one for each dimension; "valid" for none, "same" for as many as
            keep the sizes.
        dilation: Distance between the elements of a window.
        groups: Number of groups of channels. The outputs of a group depend on its own inputs only.
        out: Tensor to write the result to. Not with gradients.

    Returns:
        ``[n, out channels, ...]``.
    """
    dims = x.dim() - 2
    if dims not in _TORCH or weight.dim() != x.dim():
        raise ArgumentError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; expected [n, channels, ...] and "
            "[out channels, channels / groups, ...] with one to three sizes"
        )
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ArgumentError(f"weight is {weight.dtype} and x {x.dtype}; expected one dtype for x, weight and bias")
    kernel, channels = tuple(weight.shape[2:]), x.shape[1]
    stride, dilation = _numbers("stride", stride, dims, 1), _numbers("dilation", dilation, dims, 1)
    pads = _padding(padding, kernel, stride, dilation)
    if groups < 1 or channels % groups or weight.shape[0] % groups:
        raise ArgumentError(
            f"groups is {groups!r}; expected a divisor of {channels} channels and of {weight.shape[0]} out channels"
        )
    if weight.shape[1] * groups != channels:
        raise ArgumentError(
            f"weight has shape {tuple(weight.shape)}; expected {channels // groups} in its second place"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},)")
    for size, k, pad, d in zip(x.shape[2:], kernel, pads, dilation, strict=True):
        if k < 1 or size + 2 * pad < d * (k - 1) + 1:
            raise ArgumentError(f"x has sizes {tuple(x.shape[2:])}; expected at least those of the window, {kernel}")
    if groups == channels and _has_kernel(x, kernel, stride, dilation):
        if is_grad_enabled() and needs_grad(x, weight, bias):
            return _depthwise(x, weight, bias, stride[0], pads)
        return FORWARD.call(x, weight, bias, stride[0], *pads, False)
    if groups == 1 and set(dilation) == {1} and _is_patches(x, kernel, stride, pads):
        return _patches(x, weight, bias)
    if level():
        raise ArgumentError(
            "this convolution is torch's, which is not batch-invariant; expected depthwise ones or patches"
        )
    return _TORCH[dims](x, weight, bias, stride, pads, dilation, groups)


OP = Op("conv", public=("conv",), kernels=(DEPTHWISE,), torch_ops=(FORWARD,), uses=("scaled_mm",))
