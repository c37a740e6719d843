"""What lazy results share: a tensor that is made at the first use for which nothing better is known.

Not a subclass of Tensor: DDP, FSDP and accelerate pass such an object on as they pass any other, and torch's functions
get the tensor by ``__torch_function__``.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.runtime.operator.autograd import top_saved_tensors_hooks
from rtkernels.runtime.torch_private import is_dynamo_compiling


def place_in_graph() -> Any:
    """Return what decides for whom a result made now is good: None without gradients, else who saves tensors here.

    What was made without gradients gives none to those who ask later. What was made inside of a checkpoint (its hooks
    save tensors) is made anew inside of it, or torch misses what was saved the first time.
    """
    if not torch.is_grad_enabled():
        return None
    return (None if is_dynamo_compiling() else top_saved_tensors_hooks(False),)


def is_good(made: Any, place: Any) -> bool:
    """Return True if a result that was made at a place can be given to one who asks here."""
    now = place_in_graph()
    return made is not None and (now is None or now == place)


class Lazy(ABC):
    """Stands for ``tensor()``, which is computed one time and kept as ``_made``, unless its place is another."""

    _made: Tensor | None = None
    _place: Any = None

    @abstractmethod
    def _make(self) -> Tensor:
        """Return the tensor, computed."""

    def tensor(self) -> Tensor:
        """Return the tensor itself; computed at the first call."""
        if not is_good(self._made, self._place):
            self._made, self._place = self._make(), place_in_graph()
        return self._made

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

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*made(args), **{name: made(value) for name, value in (kwargs or {}).items()})


def _of_tensors(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Lazy, *others: Any) -> Any:
        given = (self.tensor(), *map(made, others))
        return function(*(reversed(given) if swapped else given))

    return method


for _name in ("matmul", "pow", "floordiv", "mod"):
    setattr(Lazy, f"__{_name}__", _of_tensors(getattr(operator, _name)))
    setattr(Lazy, f"__r{_name}__", _of_tensors(getattr(operator, _name), swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "abs"):
    setattr(Lazy, f"__{_name}__", _of_tensors(getattr(operator, _name)))
Lazy.__rtruediv__ = _of_tensors(operator.truediv, swapped=True)


def made(value: Any) -> Any:
    """Return a value with tensors in place of lazy ones, inside of tuples and lists too."""
    if isinstance(value, Lazy):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(made(v) for v in value)
    return value
