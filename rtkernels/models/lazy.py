"""What lazy results share: a tensor that is made at the first use for which nothing better is known.

Not a subclass of Tensor: DDP, FSDP and accelerate pass such an object on as they pass any other, and torch's functions
get the tensor by ``__torch_function__``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Lazy(ABC):
    """Stands for ``tensor()``, which subclasses compute one time and keep as ``_made``."""

    _made: Tensor | None = None

    @abstractmethod
    def tensor(self) -> Tensor:
        """Return the tensor itself; computed at the first call."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape that the tensor has, known before it is computed."""

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    # ---- everything else is the tensor's ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_made" not in self.__dict__:  # copied or unpickled, and without values so far
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Any) -> Tensor:
        return self.tensor() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self.tensor() - other

    def __rsub__(self, other: Any) -> Tensor:
        return other - self.tensor()

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __truediv__(self, other: Any) -> Any:
        return self.tensor() / other

    def __neg__(self) -> Any:
        return self * -1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*made(args), **{name: made(value) for name, value in (kwargs or {}).items()})


def made(value: Any) -> Any:
    """Return a value with tensors in place of lazy ones, inside of tuples and lists too."""
    if isinstance(value, Lazy):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(made(v) for v in value)
    return value
