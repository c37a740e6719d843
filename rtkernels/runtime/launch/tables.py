"""Address tables: how one launch accesses the tensors of a list.

A table is an int64 tensor on the device; some of its words are addresses of other tensors. It is built once per list
and found by what it depends on: the address of every tensor and its type, dtype, device, sizes and strides. The look-up
takes two C-level passes over the list and no device work; ``TensorList`` skips even that.

A table and its memory belong to the stream that was current when it was built: no call on another stream can overtake
the upload, and freed memory is reused in order. While a CUDA graph is captured, a new table is always built, and the
graph itself uploads it from pinned memory that is never freed or changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor

from rtkernels.errors import ArgumentError, NotWarmError
from rtkernels.runtime.checks import check_dtype, check_tensor
from rtkernels.runtime.launch.memory import current_stream, is_capturing
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.torch_private import TENSOR_TYPES, TensorGuards, refuse_lazy, same_tensors

_TABLES_LIMIT = 64
_SLAB_WORDS = 1 << 20  # words of pinned memory allocated at a time, for tables that graphs upload

_data_ptr = Tensor.data_ptr


def _capturing(device: int) -> bool:
    if torch._C._cuda_getDevice() == device:
        return is_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class TensorList(tuple):
    """Tensors that are used together repeatedly; see ``rtkernels.tensor_list``."""

    tables: dict[Any, Any]
    requires_grad: bool  # True if any of them does

    def __new__(cls, tensors: Iterable[Tensor]) -> TensorList:
        table = super().__new__(cls, tensors)
        table.tables = {}
        table.requires_grad = any(getattr(t, "requires_grad", False) for t in table)
        return table


class _Slot:
    """The last table for lists of this length with these first and last addresses on this stream."""

    __slots__ = ("entry",)

    def __init__(self, *key: Any) -> None:
        self.entry: tuple[list[int], _Matcher | None, Any] = ([], None, None)


class Tables:
    """The tables that one function builds, by list and stream.

    Args:
        build: ``build(lists, device)`` returns any object; it calls ``upload``.
        check: Raises an ArgumentError for unsupported lists.
    """

    def __init__(
        self,
        build: Callable[[Sequence[Sequence[Tensor]], int], Any],
        check: Callable[[Sequence[Sequence[Tensor]]], None] = lambda lists: None,
    ) -> None:
        self._make, self.check = build, check
        self._slots = Plans(_Slot)  # cleared together with the plans of the ops

    def _build(self, lists: Sequence[Sequence[Tensor]], device: int) -> Any:
        self.check(lists)
        return self._make(lists, device)

    def known(self, lists: Sequence[Sequence[Tensor]]) -> Any:
        """Return the table of lists that were used before; None if there is none.

        Also None if a tensor requires a gradient or a graph is being captured.
        """
        try:
            device = lists[0][0].get_device()
            if device < 0 or _capturing(device):
                return None
            flat = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
            pointers = list(map(_data_ptr, flat))
        except (AttributeError, IndexError, RuntimeError, TypeError):  # an empty list, or a tensor without memory
            return None
        slot = self._slots.get((tuple(map(len, lists)), pointers[0], pointers[-1], current_stream(device)))
        if slot is None:
            return None
        known, same, table = slot.entry
        return table if known == pointers and same.without_gradients and same(*flat) else None

    def find(self, lists: Sequence[Sequence[Tensor]]) -> Any:
        """Return the result of ``build`` for these lists, building it if needed; the first list is not empty."""
        first = lists[0]
        device = first[0].get_device()
        if device < 0:
            stream = -1
        elif _capturing(device):
            # Never a cached table, which may be gone when the graph runs; nor is this one cached.
            return self._build(lists, device)
        else:
            stream = current_stream(device)
        if len(lists) == 1 and type(first) is TensorList and device >= 0:
            table = first.tables.get((id(self), stream))
            if table is None:
                table = first.tables[id(self), stream] = self._build(lists, device)
            return table
        flat = first if len(lists) == 1 else list(chain.from_iterable(lists))
        try:
            pointers = list(map(_data_ptr, flat))
        except RuntimeError:  # a tensor without memory, such as a sparse one
            self._build(lists, device)
            raise
        slot = self._slots[tuple(map(len, lists)), pointers[0], pointers[-1], stream]
        known, same, table = slot.entry
        if known == pointers and same(*flat):
            return table
        table = self._build(lists, device)
        slot.entry = (pointers, _Matcher(flat), table)
        if len(self._slots) > _TABLES_LIMIT:
            self._slots.pop(next(iter(self._slots)), None)
        return table


class _Matcher:
    """Compares tensors with the metadata of a list, without keeping its tensors alive.

    The guards are created when a list is used for the second time: lists that are used once, such as gradients that are
    allocated in every step, should not pay for them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = list(map(_metadata, tensors))
        self._check: Callable[..., bool] | None = None
        self.without_gradients = False  # set with the guards, which check requires_grad

    def __call__(self, *tensors: Tensor) -> bool:
        if self._check is not None:
            return self._check(*tensors)
        if list(map(_metadata, tensors)) != self._known:
            return False
        if TensorGuards is not None:
            self._check = same_tensors(tensors)
            self.without_gradients = not any(t.requires_grad for t in tensors)
        return True


def _metadata(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.get_device(), t.shape, t.stride(), t.is_neg()


# ---- uploading ------------------------------------------------------------------------------------------------------

_slab: Tensor | None = None
_slab_used = 0
_of_graphs: list[tuple[Tensor, Tensor]] = []  # kept alive, because a graph reads its tables at every replay
_lock = threading.Lock()


def upload(words: numpy.ndarray, device: int, targets: Callable[[], Mapping[int, Tensor]]) -> Tensor:
    """Return a table on a device without synchronising.

    Args:
        words: int64.
        device: CUDA ordinal, or -1 for the host emulator.
        targets: For the emulator, returns the tensors whose addresses are in the table, by index of the word.

    Raises:
        NotWarmError: A CUDA graph is being captured, and there is no pinned memory to upload the table from.
    """
    source = torch.from_numpy(words)
    if device < 0:
        from rtkernels import emulator

        emulator.points_to(source, targets())
        return source
    if _capturing(device):
        return _upload_by_graph(source, device)
    _make_slab(len(words))
    table = torch.empty(len(words), dtype=torch.int64, device=f"cuda:{device}")
    table.copy_(source.pin_memory(), non_blocking=True)
    return table


def _make_slab(words: int) -> None:
    """Allocate pinned memory for a table of this size now, because a capture cannot allocate it."""
    global _slab, _slab_used
    with _lock:
        if _slab is None or len(_slab) - _slab_used < words:
            _slab = torch.empty(max(_SLAB_WORDS, 4 * words), dtype=torch.int64, device="cpu", pin_memory=True)
            _slab_used = 0


def _upload_by_graph(source: Tensor, device: int) -> Tensor:
    global _slab_used
    with _lock:
        if _slab is None or len(_slab) - _slab_used < len(source):
            raise NotWarmError(
                "the table of this tensor list cannot be built while a CUDA graph is captured: no pinned memory is "
                "left; call the op once with these tensors before the capture"
            )
        staged = _slab[_slab_used : _slab_used + len(source)]
        _slab_used += len(source)
    staged.copy_(source)
    table = torch.empty(len(source), dtype=torch.int64, device=f"cuda:{device}")
    table.copy_(staged, non_blocking=True)
    _of_graphs.append((staged, table))
    return table


# ---- what every list must be ----------------------------------------------------------------------------------------


def check_list(name: str, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Raise an ArgumentError unless all are gap-free tensors of these dtypes on one device."""
    if (
        set(map(type, tensors)) <= TENSOR_TYPES
        and {t.layout for t in tensors} <= {torch.strided}
        and {t.dtype for t in tensors} <= set(dtypes)
        and {t.device for t in tensors} <= {device}
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    ):
        return  # the usual case; the slower code below finds the error
    for i, t in enumerate(tensors):
        check_tensor(f"{name}[{i}]", t)
        if t.layout != torch.strided:
            raise ArgumentError(f"{name}[{i}] has layout {t.layout}; expected a dense tensor")
        check_dtype(f"{name}[{i}]", t.dtype, dtypes)
        if t.device != device:
            raise ArgumentError(f"{name}[{i}] is on {t.device}; expected {device}, that of the first tensor")
        refuse_lazy(f"{name}[{i}]", t)
        if not t.is_contiguous() and not _fills_memory(t):
            raise ArgumentError(
                f"{name}[{i}] has shape {tuple(t.shape)} and strides {tuple(t.stride())}, which leave gaps or overlap; "
                "expected a contiguous tensor, or a permutation of one (call .contiguous())"
            )


def _fills_memory(t: Tensor) -> bool:
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def same_order(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one shape have their elements in the same order in memory."""
    if a.shape != b.shape:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(size == 1 or p == q for size, p, q in zip(a.shape, a.stride(), b.stride(), strict=True))
