"""Zeros that cost no launch: for kernels that count, draw their work, or find out which block is the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels._registry import dispatched

_AT_ONCE = 64
_zeros: dict[tuple[int, int, int], list[Tensor]] = {}
_kept: dict[tuple[int, int], Tensor] = {}


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


def kept_zeros(device: int, n: int) -> Tensor:
    """Return at least `n` int32, zeros or what the last kernel of the stream that got them has left.

    On a CUDA device, or for -1 on the CPU. For kernels that leave everything as they want to find it. What a graph or a
    compiled graph calls gets zeros of its own, for the reasons of :func:`fresh_zeros`.
    """
    place, key = "cpu" if device < 0 else f"cuda:{device}", (device, 0)
    if device >= 0:
        if dispatched() or torch.cuda.is_current_stream_capturing():
            return torch.zeros(n, dtype=torch.int32, device=place)
        key = device, torch._C._cuda_getCurrentRawStream(device)
    kept = _kept.get(key)
    if kept is None or kept.numel() < n:
        with torch.inference_mode(False):
            kept = _kept[key] = torch.zeros(n, dtype=torch.int32, device=place)
    return kept
