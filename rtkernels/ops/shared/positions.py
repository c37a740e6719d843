"""Checks of token positions on the device, which ``RTKERNELS_DEBUG`` enables."""

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
    ends = (first, first) if pos is None else _ends(pos, -first, capacity - length - first)
    if ends is None:
        return
    low, high = (first + end for end in ends) if pos is not None else ends
    if low < 0 or high + length > capacity:
        raise ArgumentError(
            f"{name} puts {length} tokens at positions {low} to {high + length - 1}; expected 0 to {capacity - 1}, "
            f"those of the cache"
        )


def check_indices(name: str, indices: Tensor | None, count: int, of: str, lowest: int = 0) -> None:
    """With ``RTKERNELS_DEBUG=1``, raise an ArgumentError unless all indices are from `lowest` to ``count - 1``.

    Args:
        name: What the caller calls `indices`.
        indices: Integers on the device, or None.
        count: How many there are of what they are indices of.
        of: What that is.
        lowest: The lowest index that is allowed, for numbers below 0 that have a meaning.
    """
    if indices is None or not env.get("DEBUG") or is_dynamo_compiling():
        return
    ends = _ends(indices, lowest, count - 1)
    if ends is not None and (ends[0] < lowest or ends[1] >= count):
        raise ArgumentError(f"{name} has {ends[0]} to {ends[1]}; expected {lowest} to {count - 1}, {of}")


def check_lengths(name: str, lengths: Tensor | None, cache: Tensor, pages: Tensor | None, of: str) -> None:
    """With ``RTKERNELS_DEBUG=1``, raise an ArgumentError unless lengths fit a cache, or a row of its table of pages."""
    if env.get("DEBUG"):
        check_indices(name, lengths, cache.shape[1] * (1 if pages is None else pages.shape[-1]) + 1, of)


def _ends(numbers: Tensor, low: int, high: int) -> tuple[int, int] | None:
    """Return the smallest and the largest number; None if there is none, or none that the host can wait for."""
    if numbers.numel() == 0:
        return None
    if numbers.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(((numbers >= low) & (numbers <= high)).all())
        return None
    smallest, largest = numbers.aminmax()
    return int(smallest), int(largest)
