"""Numbers in the place of tensors: how torch hands them to operators, and how an override gives them back.

Some operators of torch mark a tensor on the device as a number and hand it to another operator. If that other operator
has an override, torch turns the tensor into a Python number for it, which is an internal error for all but CPU tensors.
So while it has one, the first operator is given the number as a plain tensor of the dtype to which torch would convert
it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _tensor(number: bool | int | float | complex, among: Tensor) -> Tensor:
    plain = torch.scalar_tensor(number, dtype=_DTYPES[type(number)], device=among.device)
    return plain.to(torch.result_type(among, number))


def _searchsorted(sorted_sequence: Tensor, self: Any, **options: Any) -> Tensor:
    return torch.searchsorted(sorted_sequence, _tensor(self, sorted_sequence), **options)


def _bucketize(self: Any, boundaries: Tensor, **options: Any) -> Tensor:
    return torch.bucketize(_tensor(self, boundaries), boundaries, **options)


def _pow(self: Any, exponent: Tensor, **options: Any) -> Tensor:
    return torch.pow(_tensor(self, exponent), exponent, **options)


class Call(NamedTuple):
    """What to call in place of torch's kernel, and the operators to which that kernel hands a marked tensor."""

    function: Callable[..., Tensor]
    reached: tuple[str, ...]


_CONVERSIONS = ("_to_copy", "copy_")
_POWERS = ("pow.Tensor_Tensor", "pow.Tensor_Tensor_out")
CALLS = {
    "searchsorted.Scalar": Call(_searchsorted, _CONVERSIONS),
    "searchsorted.Scalar_out": Call(_searchsorted, _CONVERSIONS),
    "bucketize.Scalar": Call(_bucketize, _CONVERSIONS),
    "pow.Scalar": Call(_pow, _POWERS),
    "pow.Scalar_out": Call(_pow, _POWERS),
}


class Guard:
    """What is registered for one of them; it gives torch's results whether or not overrides are switched on.

    Args:
        name: The overload.
    """

    def __init__(self, name: str) -> None:
        self.call = CALLS[name].function

    def switch(self, *_: Any) -> None:
        """Do nothing: there is nothing to switch."""


# ---- numbers that an override gives back -----------------------------------------------------------------------------


class _NumberCall(threading.local):
    call: Any = None  # a function with its arguments and keywords; afterwards its result


_number_call = _NumberCall()


def with_numbers_as_tensors(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a boxed kernel with Python numbers in place of tensors.

    They become 0-d tensors that count as numbers in type promotion, as in ``x + 2``. Python code cannot create such
    tensors, and torch converts numbers to them only while Python calls an operator of aten or prims. So the kernel is
    called inside such an operator, which is defined here.
    """
    _number_call.call = function, args, kwargs
    try:
        _number_operator()()
        return _number_call.call
    finally:
        _number_call.call = None


def _number_operator() -> Callable[[], None]:
    with _defining:  # a second definition is an error, and a cache alone would allow two threads to define it
        return _defined_number_operator()


@functools.cache
def _defined_number_operator() -> Callable[[], None]:
    library = torch.library.Library("prims", "FRAGMENT")
    library.define("rtkernels_numbers() -> ()")

    def run() -> None:
        function, args, kwargs = _number_call.call
        _number_call.call = function(*args, **kwargs)

    library.impl("rtkernels_numbers", run, "CompositeExplicitAutograd")
    _libraries.append(library)
    return torch.ops.prims.rtkernels_numbers.default._op


_defining = threading.Lock()
_libraries: list[Any] = []  # kept alive, because definitions end with their library
