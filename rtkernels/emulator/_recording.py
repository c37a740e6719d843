"""Context of emulated launches: pointers that know their tensor, and poisoned uninitialised memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from rtkernels.emulator._dependent import history


class Pointer(int):
    """An address that keeps the tensor it came from, also after an offset is added."""

    tensor: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pointer:
        pointer = cls(tensor.data_ptr())
        pointer.tensor = tensor
        return pointer

    def __add__(self, other: int) -> Pointer:
        moved = Pointer(int(self) + int(other))
        moved.tensor = self.tensor
        return moved

    __radd__ = __add__

    def __sub__(self, other: int) -> Pointer:
        return self + -int(other)


TARGETS = "_rtkernels_targets"


def points_to(table: torch.Tensor, targets: Mapping[int, torch.Tensor]) -> None:
    """Declare that words of a table hold addresses of tensors.

    A kernel that gets the table may then follow these words: the tensors are tracked and checked as arguments are. All
    other words are plain numbers. The table keeps the tensors alive.

    Args:
        table: Dense int64. Give the kernel ``table.data_ptr()`` of this very object.
        targets: Index of the word -> tensor; the word is the tensor's ``data_ptr()``.
    """
    setattr(table, TARGETS, dict(targets))


_EMPTY = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}


# Uninitialised memory: NaN in every float format, and no number that a kernel would take for an index or for "unused"
# (int32 2146795509, int64 9.2e18). Formats of one byte have NaN at 0xff.
_POISON = numpy.array([0xF5, 0x7F], numpy.uint8)
_SMALL_FLOAT_POISON = 0xFF
_FILLS = {
    *(torch.zeros, torch.zeros_like, torch.ones, torch.ones_like, torch.full, torch.full_like),
    *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
    *(torch.Tensor.zero_, torch.Tensor.fill_, torch.Tensor.copy_),
}


def poison(fresh: torch.Tensor) -> None:
    """Fill the whole storage of a new CPU tensor with poison."""
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(fresh.untyped_storage())
    if fresh.is_floating_point() and fresh.element_size() == 1:
        storage.fill_(_SMALL_FLOAT_POISON)
        return
    memory = storage.numpy()
    memory[: memory.size & ~1].view(numpy.uint16)[:] = _POISON.view(numpy.uint16)
    memory[memory.size & ~1 :] = _POISON[0]


class Recording(TorchFunctionMode):
    """Make ``data_ptr()`` return a ``Pointer`` and poison uninitialised memory while a launcher runs."""

    def __enter__(self) -> Recording:
        history().begin_op()
        return super().__enter__()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.data_ptr:
            return Pointer.of(args[0])
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.device.type == "cpu":
            poison(result)
        elif func in _FILLS and result.device.type == "cpu":
            history().note_fill(result)
        return result
