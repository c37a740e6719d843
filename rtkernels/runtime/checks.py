"""Checks of an argument's dtype and shape; their messages name the argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rtkernels.errors import ArgumentError

DTYPE_TOKEN = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(name: str, value: Any) -> None:
    """Raise an ArgumentError that names the argument unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")


def check_dimensions(name: str, shape: Sequence[int]) -> None:
    """Raise an ArgumentError that names the argument unless it has dimensions."""
    if not shape:
        raise ArgumentError(f"{name} has no dimensions; expected at least one")


def token(name: str, dtype: torch.dtype, accepted: Sequence[torch.dtype] = FLOAT_DTYPES) -> str:
    """Return the template token of a dtype, or raise an ArgumentError that names the argument."""
    check_dtype(name, dtype, accepted)
    return DTYPE_TOKEN[dtype]


def check_dtype(name: str, dtype: torch.dtype, accepted: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Raise an ArgumentError that names the argument unless its dtype is an accepted one."""
    if dtype not in accepted:
        wanted = ", ".join(dict.fromkeys(map(spell, accepted)))
        raise ArgumentError(f"{name} has dtype {spell(dtype)}; expected one of {wanted}")


def check_shape(name: str, shape: Sequence[int], wanted: Sequence[int], why: str = "") -> None:
    """Raise an ArgumentError that names the argument unless it has the wanted shape."""
    if tuple(shape) != tuple(wanted):
        raise ArgumentError(f"{name} has shape {tuple(shape)}; expected {tuple(wanted)}{why and f', {why}'}")


def refuse_shape(name: str, shape: Sequence[int], wanted: str) -> None:
    """Raise an ArgumentError that names an argument, its shape and what was expected; by default, any dimensions."""
    if not wanted:
        check_dimensions(name, shape)
    raise ArgumentError(f"{name} has shape {tuple(shape)}; expected {wanted}")


def check_same(name: str, got: Any, wanted: Any, what: str, of: str = "x") -> None:
    """Raise an ArgumentError unless an argument has the dtype, shape or device index of another one."""
    if got != wanted:
        raise ArgumentError(f"{name} has {what} {spell(got)}; expected {spell(wanted)}, that of {of}")


def spell(value: Any) -> str:
    """Return a dtype or a shape as messages have it."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
