"""Options that the public functions of attention share: windows, the factor of scores, the soft cap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.backends import ATTENTION, FP16_SUMS
from rtkernels.ops.attention.mma_plan import gains_from_fp16
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.operator.arguments import check_integer, check_number
from rtkernels.runtime.operator.autograd import refuse_gradients


def window_sides(window: int | Sequence[int | None] | None, causal: bool) -> tuple[int, int]:
    """Return how many keys a query sees to the left and to the right of its own, -1 for all."""
    if window is None:
        left = right = -1
    elif isinstance(window, int):
        left, right = check_integer("window", window), -1
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ArgumentError(f"window is {window!r}; expected an int or a pair (left, right)")
        left, right = (-1 if side is None else check_integer("window", side) for side in window)
    if left < -1 or right < -1:
        raise ArgumentError(f"window is {window!r}; expected numbers from 0 on, or None or -1 for no limit")
    return left, 0 if causal and right < 0 else right if not causal else min(right, 0)


def default_scale(scale: float | None, q: Tensor) -> float:
    """Return the factor of products of q and k: 1 / sqrt(width of a head) unless one is given."""
    if scale is not None:
        return float(check_number("scale", scale))
    if not q.shape:
        raise ArgumentError("q has no dimensions; expected those of tokens and heads, and the elements of a head")
    return 1.0 / math.sqrt(max(q.shape[-1], 1))


def check_softcap(softcap: float) -> float:
    """Return the soft cap as a float (0: none), or raise an ArgumentError."""
    if not 0.0 <= check_number("softcap", softcap) < math.inf:
        raise ArgumentError(f"softcap is {softcap}; expected 0 (none) or a positive number")
    return float(softcap)


def check_backend(backend: str) -> None:
    """Raise an ArgumentError for a backend that only `acc` can ask for."""
    if backend in tuple(FP16_SUMS):
        expected = ", ".join(map(repr, ("auto", *ATTENTION.names)))
        raise ArgumentError(f"backend is {backend!r}; expected one of {expected}, and acc={backend!r} in attention()")


def fp16_sums(acc: str, backend: str, q: Tensor, tensors: Sequence[Tensor | None]) -> str:
    """Return the backend of attention with sums in fp16, or raise an ArgumentError."""
    if acc not in FP16_SUMS:
        raise ArgumentError(f"acc is {acc!r}; expected 'fp32', {', '.join(map(repr, FP16_SUMS))}")
    if backend not in ("auto", "mma"):
        raise ArgumentError(f"backend is {backend!r} and acc is {acc!r}; expected 'auto' or 'mma'")
    if q.dtype != torch.float16:
        raise ArgumentError(f"q has dtype {str(q.dtype).removeprefix('torch.')} and acc is {acc!r}; expected float16")
    refuse_gradients(f"attention(acc={acc!r})", tensors)
    if q.is_cuda and not gains_from_fp16(target := device_info(q.get_device()).target):
        raise ArgumentError(f"acc is {acc!r}; expected 'fp32' on {target}, whose products take as long with either")
    return acc
