"""Operators of torch that mark a tensor on the device as a number and hand it to another operator.

If that other operator has an override, torch turns the tensor into a Python number for it, which is an internal error
for all but CPU tensors. So while it has one, the first operator is given the number as a plain tensor of the dtype to
which torch would convert it.
"""

from __future__ import annotations

from collections.abc import Callable
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
