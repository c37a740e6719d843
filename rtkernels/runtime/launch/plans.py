"""Plans of operators, cached by the metadata of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rtkernels.errors import ArgumentError, UnsupportedDeviceError
from rtkernels.runtime.torch_private import jit_tracing_state

_PLANS_LIMIT = 4096


class Plans(dict):
    """Plans of an op by tensor metadata, computed by ``build(*key)`` at the first look-up.

    The key must contain everything that validation and launch depend on. The size is limited: programs with
    ever-changing shapes start over instead of growing.
    """

    _all: ClassVar[list[Plans]] = []
    replays: ClassVar[list[Callable[[], None]]] = []  # functions that make operators forget their last call

    def __init__(self, build: Callable[..., Any]) -> None:
        super().__init__()
        self._build = build
        self._all.append(self)

    @classmethod
    def forget_all(cls) -> None:
        """Drop the plans of every op, and those kept for recent calls."""
        for plans in cls._all:
            plans.clear()
        for forget in cls.replays:
            forget()

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        if jit_tracing_state() is not None:
            raise UnsupportedDeviceError(
                "torch.jit.trace would record the results of device code as constants; use torch.export"
            )
        if any(isinstance(value, torch.Tensor) for value in key):
            raise ArgumentError("got a tensor where a number is expected; a plan would keep its value")
        plan = self._build(*key)
        if len(self) >= _PLANS_LIMIT:
            self.clear()
        self[key] = plan
        return plan
