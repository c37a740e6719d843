"""Logits that are computed only when they are read.

In training with labels only the loss needs them, and it takes the hidden states and the head instead. Multiplication
and division by a number, a soft cap (divide, tanh, multiply) and dtype conversions are recorded. Any other operation
computes the logits once and continues with a tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtkernels.models.lazy import Lazy


class Shaping(NamedTuple):
    """Operations on logits before the loss: times `scale`, then with `softcap` ``softcap * tanh(x / softcap)``."""

    scale: float
    softcap: float | None


_CAST = (torch.bfloat16, torch.float16, torch.float32)


def _autocast(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products under autocast on a device, None without autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _with_autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products have the dtype of :func:`_autocast`."""
    if dtype == _autocast(device):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


class LazyLogits(Lazy):
    """The logits of hidden states ``[..., hidden size]`` under a head, with recorded operations applied."""

    def __init__(self, hidden: Tensor, head: nn.Module, steps: tuple[tuple[str, Any], ...] = ()) -> None:
        self.hidden, self.head, self.steps = hidden, head, steps
        self._result: Tensor | None = None
        self.autocast = _autocast(hidden.device)  # of the call, not of the code that reads the logits
        trained = any(p is not None and p.requires_grad for p in head._parameters.values())
        self.trains = torch.is_grad_enabled() and (hidden.requires_grad or trained)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        converted = [value for name, value in self.steps if name == "to"]
        if converted:
            return converted[-1]
        return self.autocast if self.autocast is not None and self.hidden.dtype in _CAST else self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def _then(self, name: str, value: Any = None) -> Any:
        if self._result is not None:
            return _applied(self.tensor(), name, value)
        result = object.__new__(LazyLogits)  # of the same call, where autograd and autocast may have been others
        result.__dict__ |= {**self.__dict__, "steps": (*self.steps, (name, value))}
        return result

    def __mul__(self, other: Any) -> Any:
        return self._then("times", float(other)) if isinstance(other, (int, float)) else self.tensor() * other

    def __truediv__(self, other: Any) -> Any:
        return self._then("over", float(other)) if isinstance(other, (int, float)) else self.tensor() / other

    def tanh(self) -> Any:
        return self._then("tanh")

    def float(self) -> Any:
        return self._then("to", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return self._then("to", args[0])
        where = args[0] if len(args) == 1 and kwargs.keys() <= {"non_blocking"} else None  # as accelerate calls it
        if isinstance(where, (str, int, torch.device)) and torch.device(where) == self.device:
            return self
        return self.tensor().to(*args, **kwargs)

    def _make(self) -> Tensor:
        with _with_autocast(self.autocast, self.device):
            logits = self.head(self.hidden, materialize=True)
        for name, value in self.steps:
            logits = _applied(logits, name, value)
        return logits

    def shaping(self) -> Shaping | None:
        """Return the recorded operations as scale and soft cap; None if they are not of that form."""
        steps = [step for step in self.steps if step[0] != "to"]
        scale, rest = 1.0, list(steps)
        names = [name for name, _ in rest]
        softcap = None
        if "tanh" in names:
            at = names.index("tanh")
            if at == 0 or len(rest) != at + 2 or names[at - 1] != "over" or names[at + 1] != "times":
                return None
            if rest[at - 1][1] != rest[at + 1][1]:
                return None
            softcap, rest = rest[at + 1][1], rest[: at - 1]
        for name, value in rest:
            scale = scale * value if name == "times" else scale / value
        return Shaping(scale, softcap)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, steps={list(self.steps)})"

    def __reduce__(self) -> Any:
        return _same, (self.tensor(),)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _applied(x: Tensor, name: str, value: Any) -> Tensor:
    if name == "times":
        return x * value
    if name == "over":
        return x / value
    if name == "tanh":
        return torch.tanh(x)
    return x.to(value)
