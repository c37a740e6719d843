"""Checks and sums that several losses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_shape, check_tensor
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.suggest import did_you_mean

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values(name: str, tensor: Any, dims: Sequence[int] = (1, 2)) -> Tensor:
    """Return log-probabilities, rewards or entropies in fp32, fp64 unchanged; check dtype and number of dimensions."""
    check_tensor(name, tensor)
    if tensor.dtype not in _FLOATS:
        raise ArgumentError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; expected a floating dtype")
    if tensor.dim() not in dims:
        wanted = " or ".join(f"{d}" for d in dims)
        raise ArgumentError(f"{name} has {tensor.dim()} dimensions; expected {wanted}")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def like(name: str, tensor: Any, other: Tensor, of: str) -> Tensor:
    """Return :func:`values` of a tensor that must have the shape of another one."""
    found = values(name, tensor, (other.dim(),))
    check_shape(name, found.shape, other.shape, f"that of {of}")
    return found


def mask_of(name: str, mask: Any, tokens: Tensor, of: str) -> Tensor:
    """Return a mask as 0 and 1 in the dtype of `tokens`; None counts all tokens."""
    if mask is None:
        return torch.ones_like(tokens)
    check_tensor(name, mask)
    check_shape(name, mask.shape, tokens.shape, f"that of {of}")
    return (mask != 0).to(tokens.dtype)


def counted(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return tokens with 0 where the mask is 0. Values there may be anything, also NaN."""
    return torch.where(mask != 0, tokens, 0.0)


def either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return one of two numbers in the dtype of `like`; ``torch.where`` of numbers would give fp32."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise an ArgumentError unless an option is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name} is {value!r}; expected one of {', '.join(known)}{did_you_mean(str(value), known)}")


def number(name: str, value: Any, low: float | None = None, high: float | None = None, above: bool = False) -> float:
    """Return a number; raise an ArgumentError unless it is at least `low` (with `above`: more) and less than `high`."""
    check_number(name, value)
    fits = value == value and (low is None or (value > low if above else value >= low))
    if not fits or (high is not None and value >= high):
        wanted = [] if low is None else [f"{'above' if above else 'at least'} {low}"]
        wanted += [] if high is None else [f"below {high}"]
        raise ArgumentError(f"{name} is {value}; expected a number {' and '.join(wanted)}".rstrip())
    return value


def divisor(name: str, value: Any, device: torch.device) -> Any:
    """Return a number of tokens as what a sum can be divided by: at least 1, without a wait if it is a tensor."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ArgumentError(f"{name} has shape {tuple(value.shape)}; expected a number or a tensor with one value")
        return value.reshape(()).to(device).clamp(min=1)
    return max(number(name, value, 0), 1)


def smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """Return the negative log-likelihood of a preference with logit `x`, given that labels may be wrong."""
    right, wrong = torch.nn.functional.logsigmoid(x), torch.nn.functional.logsigmoid(-x)
    return -(1 - label_smoothing) * right - label_smoothing * wrong
