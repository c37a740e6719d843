"""Checks that the arguments of an operator have the types that its schema names.

The dispatcher checks this too, but most calls bypass it, and its messages are hard to read. Plain calls with CUDA
tensors check types only after they failed: a value that is not a number makes the look-up in ``Plans``, the planning
or the packing of a launch raise. Functions that compare or compute with an option before an operator gets it declare
it (``Among``, ``Within``), or call ``check_number`` or ``check_integer``.
"""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.torch_private import refuse_lazy

_ACCEPTED: dict[str, tuple[Any, str]] = {
    "Tensor": (Tensor, "a torch.Tensor"),
    "Optional[Tensor]": ((Tensor, type(None)), "a torch.Tensor or None"),
    "float": ((Real, torch.SymFloat, torch.SymInt), "a number"),
    "int": ((Integral, torch.SymInt), "an integer"),
    "bool": ((Integral, numpy.bool_, torch.SymBool), "True or False"),
    "str": (str, "a string"),
    "Optional[str]": ((str, type(None)), "a string or None"),
    "ScalarType": (torch.dtype, "a torch.dtype"),
    "Optional[ScalarType]": ((torch.dtype, type(None)), "a torch.dtype or None"),
}
_INT64 = range(-(2**63), 2**63)


class ArgumentTypes:
    """The argument types of an operator's schema."""

    def __init__(self, schema: torch._C.FunctionSchema) -> None:
        self._arguments = [(argument.name, str(argument.real_type)) for argument in schema.arguments]
        self._written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]

    def check(self, *args: Any) -> None:
        """Raise an ArgumentError that names the first argument of a wrong type."""
        for (name, kind), value in zip(self._arguments, args, strict=True):
            if kind == "List[Tensor]":
                for i, tensor in enumerate(value):
                    check_kind(f"{name}[{i}]", "Tensor", tensor)
            elif kind in _ACCEPTED:
                check_kind(name, kind, value)
                if kind == "int" and isinstance(value, int) and value not in _INT64:
                    raise ArgumentError(f"{name} is {value}; expected an integer of 64 bits")
                if kind == "bool":
                    check_boolean(name, value)
        self._check_devices(args)
        for i in self._written:
            if isinstance(args[i], Tensor):
                refuse_lazy(self._arguments[i][0], args[i])
            elif args[i] is not None:
                for j, tensor in enumerate(args[i]):
                    refuse_lazy(f"{self._arguments[i][0]}[{j}]", tensor)

    def _check_devices(self, args: tuple[Any, ...]) -> None:
        """Raise unless all tensors are on the device of the first one."""
        where, of = None, ""
        for (name, kind), value in zip(self._arguments, args, strict=True):
            if kind not in ("Tensor", "Optional[Tensor]") or value is None:
                continue
            if where is None:
                where, of = value.device, name
            elif value.device != where:
                raise ArgumentError(f"{name} is on {value.device}; expected {where}, that of {of}")


def check_kind(name: str, kind: str, value: Any) -> None:
    """Raise an ArgumentError if an argument is not of its type in a schema, of those that are checked here."""
    accepted, wanted = _ACCEPTED.get(kind, (object, ""))
    if not isinstance(value, accepted):
        came = repr(value) if value is None or isinstance(value, (str, complex)) else f"a {type(value).__name__}"
        raise ArgumentError(f"{name} is {came}; expected {wanted}")


def check_number(name: str, value: Any) -> Any:
    """Return an option unchanged; raise an ArgumentError that names it if it is not a number."""
    if type(value) is not float:
        check_kind(name, "float", value)
    return value


def check_integer(name: str, value: Any) -> Any:
    """Return an option unchanged; raise an ArgumentError that names it if it is not an integer."""
    if type(value) is not int:
        check_kind(name, "int", value)
    return value


def check_boolean(name: str, value: Any) -> None:
    """Raise an ArgumentError for an integer that is neither 0 nor 1, because kernels would not treat it as True."""
    if type(value) is not bool and isinstance(value, Integral) and value not in (0, 1):
        raise ArgumentError(f"{name} is {value}; expected True or False")


class Among(NamedTuple):
    """An option of a public function that has one of some values.

    Attributes:
        values: All of them.
        wanted: The same in words, for messages.
    """

    values: Collection[Any]
    wanted: str


class Matching(NamedTuple):
    """A tensor among the arguments of a public function; may be None if that is its default.

    Attributes:
        dtypes: Accepted dtypes; empty for any.
        condition: An expression of the tensor's name, ``"weight.dim() == 2"``; empty for any shape.
        wanted: The shape in words, for messages.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    condition: str = ""
    wanted: str = ""


class Within(NamedTuple):
    """A number among the arguments of a public function, within limits; may be None if that is its default.

    Attributes:
        kind: "int" or "float".
        condition: An expression of the number's name, ``"0 <= alpha <= 1"``; empty for any number.
        wanted: The same in words, for messages.
    """

    kind: str
    condition: str = ""
    wanted: str = ""


def refuse_option(name: str, value: Any, wanted: str) -> None:
    """Raise an ArgumentError that names an option, what came and what was expected."""
    raise ArgumentError(f"{name} is {repr(value) if isinstance(value, str) else value}; expected {wanted}")
