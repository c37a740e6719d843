"""What top-k, the router and its losses share on the host: rows in registers of a warp, and cleared memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels._layout import row_count, row_stride, token, vector_bytes
from rtkernels._registry import dispatched
from rtkernels.errors import ArgumentError

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COLUMNS = (2, 8)  # of a lane
WARP_COLUMNS = 256  # at most
MAX_K = 64

Meta = tuple[Any, ...]


def check_rows(name: str, meta: Meta, most: int, what: str = "columns") -> None:
    """Raise an ArgumentError unless a tensor is of a float type, with 1 to `most` numbers in its last dimension."""
    dtype, shape = meta[0], meta[1]
    token(name, dtype)
    if not shape:
        raise ArgumentError(f"{name} has no dimensions; expected at least one")
    if not 1 <= shape[-1] <= most:
        raise ArgumentError(f"{name} has {shape[-1]} {what}; expected 1 to {most}")


def check_k(k: int, cols: int) -> None:
    """Raise an ArgumentError unless `k` numbers of a row can be chosen."""
    if not 1 <= k <= min(MAX_K, cols):
        raise ArgumentError(f"k is {k}; expected 1 to {min(MAX_K, cols)} for rows of {cols}")


def lane_columns(cols: int) -> int:
    """Return how many columns of such a row a lane holds."""
    return 2 if cols <= 64 else 8


def whole_pieces(meta: Meta, align: int, v: int) -> bool:
    """Return True if a lane can read its columns in whole pieces."""
    dtype, shape, stride = meta[:3]
    size = dtype.itemsize
    wanted = min(16, v * size)
    steps = 0 if row_count(shape) <= 1 else row_stride(shape, stride) * size
    return shape[-1] % v == 0 and vector_bytes(align, steps, most=wanted) == wanted


# ---- zeros that cost no launch --------------------------------------------------------------------------------------

_AT_ONCE = 64
_zeros: dict[tuple[int, int, int], list[Tensor]] = {}


def fresh_zeros(device: int, n: int) -> Tensor:
    """Return `n` int32 zeros that nobody has or had, on a CUDA device or, for -1, on the CPU.

    Kernels that count, or find out which block is the last one, start from zeros; clearing a few hundred bytes takes as
    long as they do. So many such tensors are cut from one cleared piece of memory, made in the stream that uses them.
    A graph is replayed, so what is captured clears its own; so does what a compiled graph calls, in whose memory the
    rest could not stay.
    """
    if device < 0:
        stream = 0
    else:
        if dispatched() or torch.cuda.is_current_stream_capturing():
            return torch.zeros(n, dtype=torch.int32, device=f"cuda:{device}")
        stream = torch._C._cuda_getCurrentRawStream(device)
    ready = _zeros.setdefault((device, stream, n), [])
    try:
        return ready.pop()
    except IndexError:
        place = "cpu" if device < 0 else f"cuda:{device}"
        with torch.inference_mode(False):  # they may be used, and saved for a backward, outside of it
            made = torch.zeros(_AT_ONCE, -(-n // 32) * 32, dtype=torch.int32, device=place)
            first, *rest = (row[:n] for row in made.unbind())
        ready.extend(rest)
        return first
