"""Memory for results: uninitialised tensors at little cost, and zeros without a launch.

Kernels that count, distribute work dynamically, or detect which block is the last one start from zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import repeat

import torch
from torch import Tensor

from rtkernels.runtime.torch_private import TENSOR_TYPES, dispatch_modes, is_dynamo_compiling

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]

# The allocator of compiled graphs: no argument parsing, no dispatcher, half the time of torch.empty_like.
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


@cache
def allocator(device: int) -> Allocate:
    """Return a function ``(shape, strides, dtype) -> uninitialised tensor`` on a CUDA device, or on the CPU for -1.

    Shape and strides must be exactly tuples; the fast allocator refuses ``torch.Size``.
    """
    place = "cpu" if device < 0 else f"cuda:{device}"
    if device >= 0 and _empty_strided_cuda is not None and torch.cuda.device_count() == 1:
        return _empty_strided_cuda

    def allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if type(shape) is not tuple or type(strides) is not tuple:  # so that tests without a GPU detect it
            raise TypeError(f"shape and strides must be tuples, got {type(shape).__name__}, {type(strides).__name__}")
        return torch.empty_strided(shape, strides, dtype=dtype, device=place)

    return allocate


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor on the device of `like`.

    Takes a third of the host time of ``torch.empty``. For public functions whose operators write to given memory, if
    only the caller needs to see the allocation.
    """
    if like.is_cuda and type(like) in TENSOR_TYPES and not (is_dynamo_compiling() or dispatch_modes()):
        return allocator(like.get_device())(shape, _kept_strides(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch computes them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


_kept_strides = lru_cache(4096)(dense_strides)
call_state = threading.local()  # operators set `dispatched` while the dispatcher calls them


def dispatched() -> bool:
    """Return True inside an operator that the dispatcher called, as compiled graphs do.

    Memory allocated then may belong to the graph's pool, and must not outlive the call unless it is returned.
    """
    return getattr(call_state, "dispatched", False)


# ---- zeros ----------------------------------------------------------------------------------------------------------

_BATCH = 64
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None in a torch without CUDA
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_ZERO_BYTES = 128 << 10  # cleared at a time if only addresses are used: enough for hundreds of small calls
_MAX_ZERO_BYTES = 4 << 20  # the same for calls that need many
_zeros: dict[tuple[int, int, int], list[Tensor]] = {}
_zero_words: dict[tuple[int, int, int], list[tuple[Tensor, int]]] = {}
_kept: dict[tuple[int, int], Tensor] = {}


def fresh_zeros(device: int, n: int) -> Tensor:
    """Return `n` int32 zeros that were never used, on a CUDA device or, for -1, on the CPU.

    Kernels that count, or detect which block is the last one, start from zeros, and clearing a few hundred bytes takes
    as long as such a kernel. So many of these tensors are cut from one cleared allocation on the stream that uses them.
    Under CUDA graph capture they are cleared separately, because the graph is replayed. The same holds for calls from
    compiled graphs, because the rest of the allocation could not stay in the graph's memory.
    """
    key = device, 0, n
    if device >= 0:
        if getattr(call_state, "dispatched", False) or is_capturing():
            with torch.inference_mode(False):  # like those below: a result does not depend on where it comes from
                return torch.zeros(n, dtype=torch.int32, device=f"cuda:{device}")
        key = device, current_stream(device), n
    try:
        return _zeros[key].pop()
    except (KeyError, IndexError):
        place = "cpu" if device < 0 else f"cuda:{device}"
        with torch.inference_mode(False):  # they may be used and saved for backward outside inference mode
            size = -(-n // 4) * 4  # each begins at a multiple of 16 bytes
            # Not views of one tensor, which would share a version counter.
            parts = torch.zeros(_BATCH * size, dtype=torch.int32, device=place).unsafe_split(size)
            first, *rest = parts if size == n else [part[:n] for part in parts]
        _zeros.setdefault(key, []).extend(rest)
        return first


def zero_words(device: int, n: int) -> tuple[Tensor, int]:
    """Return memory, and an address in it with `n` int32 zeros, under the conditions of :func:`fresh_zeros`.

    For scratch memory of which only the address is used: no tensor is created for it. The zeros stay reserved while the
    caller keeps the memory. The rest of the memory is kept separately for each n; see :func:`zero_words_for`.
    """
    if device < 0 or getattr(call_state, "dispatched", False) or is_capturing():
        zeros = fresh_zeros(device, n)
        return zeros, zeros.data_ptr()  # in the emulator, an address belongs to the tensor of one call
    key = device, current_stream(device), n
    try:
        return _zero_words[key].pop()
    except (KeyError, IndexError):
        step = -(-n // 32) * 128
        count = max(1, _ZERO_BYTES // step, min(_BATCH, _MAX_ZERO_BYTES // step))
        zeros = torch.zeros(count * step // 4, dtype=torch.int32, device=f"cuda:{device}")
        first = zeros.data_ptr()
        pairs = list(zip(repeat(zeros), range(first, first + count * step, step)))
        found = pairs.pop()
        _zero_words[key] = pairs
        return found


def zero_words_for(device: int, n: int) -> int:
    """Return how many zeros a plan that needs `n` requests from ``zero_words``: one of a few numbers.

    Token counts change from step to step, and zeros are kept for each number. On the CPU the exact n is returned, so
    that the emulator detects accesses beyond it.
    """
    return n if device < 0 else max(32, 1 << (n - 1).bit_length())


def kept_zeros(device: int, n: int) -> Tensor:
    """Return at least `n` int32 that are zeros, or the values left by the last kernel of the stream that used them.

    On a CUDA device, or for -1 on the CPU. For kernels that restore the values they need. Captured and compiled graphs
    get zeros of their own, for the reasons of :func:`fresh_zeros`.
    """
    place, key = "cpu" if device < 0 else f"cuda:{device}", (device, 0)
    if device >= 0:
        if dispatched() or is_capturing():
            return torch.zeros(n, dtype=torch.int32, device=place)
        key = device, current_stream(device)
    kept = _kept.get(key)
    if kept is None or kept.numel() < n:
        with torch.inference_mode(False):
            kept = _kept[key] = torch.zeros(n, dtype=torch.int32, device=place)
    return kept
