"""The base class of lazy results: a tensor that is computed when an operation needs its values.

It is not a subclass of Tensor: DDP, FSDP and accelerate pass it on like any other object, and torch functions get the
computed tensor through ``__torch_function__``.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from rtkernels.errors import RtkError
from rtkernels.runtime.operator.autograd import top_saved_tensors_hooks
from rtkernels.runtime.torch_private import is_dynamo_compiling


def place_in_graph() -> Any:
    """Return the autograd context in which a cached result is valid: None without gradients, else the top saving hooks.

    A result computed without gradients cannot provide them later. A result computed inside a checkpoint, which installs
    saved-tensor hooks, must be computed again inside the recomputation, because torch compares what both passes save.
    """
    if not torch.is_grad_enabled():
        return None
    return (None if is_dynamo_compiling() else top_saved_tensors_hooks(False),)


def is_good(result: Any, place: Any) -> bool:
    """Return True if a result that was cached in context `place` is valid in the current one."""
    now = place_in_graph()
    return result is not None and (now is None or now == place)


_APPLY = getattr(getattr(Function.apply, "__func__", None), "__code__", None)  # None from torch 2.15 on: it is C++


def is_inside_of_function() -> bool:
    """Return True inside the forward of an autograd Function; a Function that calls modules is a checkpoint.

    Code elsewhere that reads without gradients, such as a metric or the indexer of a sparse attention, needs none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:
            return True
        if code.co_name == "forward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, FunctionCtx):
                return True
        if code.co_name == "forward" and _APPLY is None and _is_of_function(code, Function):
            return True
        frame = frame.f_back
    return False


def _is_of_function(code: Any, cls: type) -> bool:
    """Return True if code is the forward of a class derived from an autograd Function; one without a context, too."""
    if getattr(getattr(vars(cls).get("forward"), "__func__", None), "__code__", None) is code:
        return True
    return any(_is_of_function(code, derived) for derived in type.__subclasses__(cls))


class Lazy(ABC):
    """Stands for ``tensor()``, which is cached in ``_result`` as long as the autograd context is the same."""

    _result: Tensor | None = None
    _place: Any = None
    trains = False  # whether the tensor has a gradient where it stands for it
    _lost = (
        "a result of a patched model that needs a gradient is read inside of the forward of an autograd Function, "
        "which takes it for an object without a gradient. Give the Function a tensor: outputs.logits[:]"
    )

    @abstractmethod
    def _make(self) -> Tensor:
        """Compute and return the tensor."""

    def tensor(self) -> Tensor:
        """Return the tensor; computed at the first call.

        Raises:
            RtkError: Its gradient would be lost.
        """
        self.check_gradient()
        if not is_good(self._result, self._place):
            self._result, self._place = self._make(), place_in_graph()
        return self._result

    def check_gradient(self) -> None:
        """Raise an RtkError if values are read where autograd would not see it."""
        if self.trains and not torch.is_grad_enabled() and not is_dynamo_compiling() and is_inside_of_function():
            raise RtkError(self._lost)

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the tensor, known before it is computed."""

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    # ---- everything else is the tensor's ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_result" not in self.__dict__:  # while it is copied or unpickled
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
        return func(*as_tensors(args), **{name: as_tensors(value) for name, value in (kwargs or {}).items()})


def _of_tensors(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Lazy, *others: Any) -> Any:
        given = (self.tensor(), *map(as_tensors, others))
        return function(*(reversed(given) if swapped else given))

    return method


for _name in ("matmul", "pow", "floordiv", "mod", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(Lazy, f"__{_name}__", _of_tensors(_function))
    setattr(Lazy, f"__r{_name}__", _of_tensors(_function, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "abs", "invert"):
    setattr(Lazy, f"__{_name}__", _of_tensors(getattr(operator, _name)))
Lazy.__rtruediv__ = _of_tensors(operator.truediv, swapped=True)


def as_tensors(value: Any) -> Any:
    """Return a value with lazy results replaced by tensors, also inside tuples and lists."""
    if isinstance(value, Lazy):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(as_tensors(v) for v in value)
    return value
