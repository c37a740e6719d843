"""How the checks of planted bugs judge an operator in the emulator: by its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from contracts.samples import samples_of
from torch import Tensor

from rtkernels import emulate

CHECKS: dict[str, Callable[[], None]] = {}
_TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-9, 1e-9),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
    torch.float8_e4m3fn: (0.15, 0.01),
    torch.float8_e5m2: (0.3, 0.01),
}
F8 = torch.float8_e4m3fn


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check under its own name."""
    CHECKS[function.__name__] = function
    return function


def _cloned(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_cloned(item) for item in value)
    return value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def agrees(op: Any, *args: Any, place: str = "sm_90") -> None:
    """Check an operator in the emulator against its reference: results, and arguments that it writes over."""
    expected_args = _cloned(args)
    expected = op.reference(*expected_args)
    with emulate(place):
        got = op(*args)
    for a, b in zip(_tensors((got, args)), _tensors((expected, expected_args)), strict=True):
        if a.dtype in (F8, torch.float8_e5m2):
            differ = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
            assert differ <= a.numel() // 50, f"{differ} of {a.numel()} codes differ"
        if a.is_floating_point():
            relative, absolute = _TOLERANCE[a.dtype]
            torch.testing.assert_close(a.double(), b.double(), rtol=relative, atol=absolute, equal_nan=True)
        else:
            assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} integers differ"


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return fp32 numbers, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sampled(op: str, *which: int, place: str = "sm_90") -> None:
    """Check an op with its samples, or with those of these numbers."""
    for i, (torch_op, args) in enumerate(samples_of(op, "cpu")):
        if not which or i in which:
            agrees(torch_op, *args, place=place)
