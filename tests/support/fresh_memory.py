"""Chooses the contents of uninitialised memory in the emulator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rtkernels import emulator


@contextmanager
def fresh_memory(byte: int) -> Iterator[None]:
    """Fill memory that launchers allocate in the emulator with this byte.

    The emulator's own poison is never a valid index. A kernel that leaves an index unwritten and later reads it as
    "none" would go unnoticed; with zeros, it becomes the index of the first item.
    """
    recording = type(emulator.recording())
    makers, before = sys.modules[recording.__module__]._EMPTY, recording.__torch_function__

    def filled(self: Any, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = before(self, func, types, args, kwargs)
        if func in makers and result.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(result.untyped_storage()).fill_(byte)
        return result

    recording.__torch_function__ = filled
    try:
        yield
    finally:
        recording.__torch_function__ = before
