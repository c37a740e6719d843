"""Positions of tokens that only the device knows: looked at if ``RTKERNELS_DEBUG`` asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime import env
from rtkernels.runtime.torch_private import is_dynamo_compiling


def check_positions(name: str, pos: Tensor | None, first: int, length: int, capacity: int) -> None:
    """With ``RTKERNELS_DEBUG=1``, raise an ArgumentError unless all tokens fit into a cache.

    That waits for the device. While a CUDA graph is captured nothing can wait: a replay with a position that does not
    fit stops with a device-side assertion instead.

    Args:
        name: What the caller calls `pos`.
        pos: Integers on the device, or None.
        first: Added to each.
        length: Tokens behind each of these positions.
        capacity: Of the cache.
    """
    if not env.get("DEBUG") or is_dynamo_compiling():
        return
    if pos is None:
        low = high = first
    elif pos.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(((pos + first >= 0) & (pos + (first + length) <= capacity)).all())
        return
    elif pos.numel() == 0:
        return
    else:
        low, high = (first + int(end) for end in pos.aminmax())
    if low < 0 or high + length > capacity:
        raise ArgumentError(
            f"{name} puts {length} tokens at positions {low} to {high + length - 1}; expected 0 to {capacity - 1}, "
            f"those of the cache"
        )
