"""Rows so far apart that their distance needs more than 32 bits, without the memory in between.

A tensor of two rows, 2^32 elements apart; the emulator only knows about the first. A kernel that finds the second
row with 64-bit numbers is reported, out of bounds; one that multiplies in 32 bits reads the first row twice, unnoticed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels.emulator import EmulatorError, _launch

FAR = 2**32
_MAP_NORESERVE = 0x4000


def far_rows(cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``[2, cols]`` with a row stride of 2^32 elements; pages are there once they are touched."""
    size = (FAR + cols) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for rows that far apart: {error}")
    return torch.frombuffer(memory, dtype=dtype).as_strided((2, cols), (FAR, 1))


@contextmanager
def _first_rows_only() -> Iterator[None]:
    whole = _launch._Buffer

    class FirstRow(whole):
        def __init__(self, index: int | tuple[int, int], name: str, tensor: Tensor) -> None:
            far = [dim for dim, step in enumerate(tensor.stride()) if step >= FAR and tensor.shape[dim] > 1]
            super().__init__(index, name, tensor.narrow(far[0], 0, 1) if far else tensor)

    _launch._Buffer = FirstRow
    try:
        yield
    finally:
        _launch._Buffer = whole


def assert_finds_far_rows(call, *args: object) -> None:
    """Check that a launch reaches the second of two far rows with a 64-bit offset."""
    with _first_rows_only(), rtkernels.emulate():
        try:
            call(*args)
        except EmulatorError as error:
            if error.kind != "out_of_bounds":
                raise
            return
    raise AssertionError("the kernel did not go to the second row: its place was worked out in 32 bits")
