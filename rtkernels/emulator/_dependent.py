"""What earlier kernels of the stream may still do while a dependent launch (``overlap=True``) has already started.

A kernel that overlaps the one before it may not read what that one writes, nor write what that one reads or writes,
before it called ``wait_for_previous``. Kernels run one after the other here, so each launch leaves a mask of the bytes
it touched, and the masks of the next launch say which bytes are not settled yet (``runtime/global_order.h``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_WRITTEN, _READ = 2, 4  # what a launch leaves in its masks
_UNTIL_WAIT, _FOR_GOOD = 3, 5  # places by which these are shifted for the next one


@dataclass
class _Touched:
    """Bytes from `start` on, and which of them a kernel wrote or read."""

    start: int
    mask: numpy.ndarray
    owners: list[StorageWeakRef]


class History:
    """The kernels of one stream that the next one may overlap."""

    def __init__(self) -> None:
        self._until_wait: list[_Touched] = []  # settled when the next kernel has waited
        self._for_good: list[_Touched] = []  # by kernels for which the last one did not wait

    def begin_op(self) -> None:
        """Forget freed memory: on the host, its next owner does not come from the stream."""
        for touched in (self._until_wait, self._for_good):
            touched[:] = [t for t in touched if not all(owner.expired() for owner in t.owners)]

    def note_fill(self, tensor: torch.Tensor) -> None:
        """Record a write by a kernel of torch: all kernels before it have ended, and it is the one to wait for."""
        self._for_good.clear()
        bytes_written = tensor.numel() * tensor.element_size() if tensor.is_contiguous() else 0
        mask = numpy.full(bytes_written, _WRITTEN, numpy.uint8)
        self._until_wait[:] = [_Touched(int(tensor.data_ptr()), mask, [StorageWeakRef(tensor.untyped_storage())])]

    def begin_launch(self, memory: Any, overlap: bool) -> None:
        """Mark in the masks of a launch what earlier kernels may still write or read."""
        if not overlap:
            self._until_wait.clear()
            self._for_good.clear()
        for segment, mask in zip(memory.segments, memory.masks, strict=False):
            for touched, shift in ((self._until_wait, _UNTIL_WAIT), (self._for_good, _FOR_GOOD)):
                for t in touched:
                    _merge(mask, int(segment.host), t, shift)

    def end_launch(self, memory: Any, overlap: bool, waited: bool, waited_first: bool) -> None:
        """Record what a launch touched.

        Args:
            memory: Its tensors and masks.
            overlap: It may have started before the kernels before it ended.
            waited: A thread waited for them.
            waited_first: A block did so before it let the next kernel start, which therefore finds them ended.
        """
        if not overlap or waited_first:
            self._for_good.clear()
            self._until_wait.clear()
        elif not waited:  # its end says nothing about theirs
            self._for_good += self._until_wait
            self._until_wait.clear()
        for segment, mask, group in zip(memory.segments, memory.masks, memory.groups, strict=False):
            owners = [StorageWeakRef(buffer.tensor.untyped_storage()) for buffer in group]
            self._until_wait.append(_Touched(int(segment.host), mask, owners))


def _merge(mask: numpy.ndarray, start: int, touched: _Touched, shift: int) -> None:
    first = max(start, touched.start)
    last = min(start + mask.size, touched.start + touched.mask.size)
    if first < last:
        theirs = touched.mask[first - touched.start : last - touched.start]
        mask[first - start : last - start] |= (theirs & (_WRITTEN | _READ)) << shift


_of_thread = threading.local()


def history() -> History:
    """Return the history of this thread, which plays the role of a stream."""
    if not hasattr(_of_thread, "history"):
        _of_thread.history = History()
    return _of_thread.history
