"""Operators of torch that make a tensor of a number on the device, marked as a number, and then convert it.

Where a conversion has an override, torch turns such a tensor into a Python number for it, which is an internal error
for all but CPU tensors. So while conversions are taken, these operators get the number as a plain tensor of the dtype
that torch would convert it to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CONVERSIONS = ("_to_copy", "copy_")
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _tensor(number: bool | int | float | complex, among: Tensor) -> Tensor:
    made = torch.scalar_tensor(number, dtype=_DTYPES[type(number)], device=among.device)
    return made.to(torch.result_type(among, number))


def _searchsorted(sorted_sequence: Tensor, self: Any, **options: Any) -> Tensor:
    return torch.searchsorted(sorted_sequence, _tensor(self, sorted_sequence), **options)


def _bucketize(self: Any, boundaries: Tensor, **options: Any) -> Tensor:
    return torch.bucketize(_tensor(self, boundaries), boundaries, **options)


CALLS = {
    "searchsorted.Scalar": _searchsorted,
    "searchsorted.Scalar_out": _searchsorted,
    "bucketize.Scalar": _bucketize,
}


class Guard:
    """What is registered for one of them; it gives torch's results whether or not conversions are taken.

    Args:
        name: The overload.
    """

    def __init__(self, name: str) -> None:
        self.call = CALLS[name]

    def switch(self, *_: Any) -> None:
        """Do nothing: there is nothing to switch."""
