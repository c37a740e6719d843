"""What fresh memory holds in the emulator, chosen by a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rtkernels import emulator


@contextmanager
def fresh_memory(byte: int) -> Iterator[None]:
    """Fill what launchers allocate in the emulator with this byte.

    The emulator's own poison is no number that a kernel takes for an index. A kernel that leaves a place unwritten and
    reads it later as "none" goes unnoticed then; with zeros, the place names the first of whatever is counted there.
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
