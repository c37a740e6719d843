"""Calls of torch's own functions, as torch does them and with a family of ours enabled, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import rtkernels
from rtkernels.aten import reset, table


@contextlib.contextmanager
def taken(place: str, families: Any) -> Iterator[None]:
    """Run the block with families enabled, whatever the sizes: emulated on the CPU, or on a GPU."""
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    emulated = contextlib.nullcontext() if place == "cuda" else rtkernels.emulate(place)
    try:
        with emulated, rtkernels.use(families):
            yield
    finally:
        table.MIN_ELEMENTS.update(limits)


def device_of(place: str) -> str:
    """Return where tensors of a place live."""
    return "cuda" if place == "cuda" else "cpu"


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random elements, with ties among integers."""
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.rand(shape) > 0.5 if dtype == torch.bool else torch.randint(0, 5, shape).to(dtype)


def views(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield tensors of odd sizes and strides; floats with NaN and infinities, too."""
    yield numbers(dtype, 1)[0]
    yield numbers(dtype, 7)
    yield numbers(dtype, 5, 7).t()
    yield numbers(dtype, 3, 4, 6).transpose(0, 2)
    yield numbers(dtype, 6, 9)[::2, 1::3]
    yield numbers(dtype, 3, 1).expand(3, 5)
    yield numbers(dtype, 2, 3, 4, 5).permute(0, 2, 1, 3)
    yield numbers(dtype, 33, 64)
    yield numbers(dtype, 4, 64, 8)
    yield numbers(dtype, 2, 64)[:, 1:]
    if dtype.is_floating_point:
        x = numbers(dtype, 9, 13)
        x[2, 3], x[2, 7], x[4, 5], x[5, 1], x[6, 0] = torch.nan, torch.nan, torch.inf, -torch.inf, -0.0
        yield x


def compare(
    place: str, family: str, function: Callable[..., Any], *args: torch.Tensor, ours: bool = True, **tolerance: float
) -> None:
    """Call a function of torch twice and compare results and strides; `ours`: no call may have gone back to torch."""
    args = tuple(a.to(device_of(place)) if isinstance(a, torch.Tensor) else a for a in args)
    want = tree_leaves(function(*args))
    reset()
    with taken(place, family):
        got = tree_leaves(function(*args))
    counts = rtkernels.report(as_rows=True)
    if ours:
        assert sum(row["ours"] for row in counts), "no call was taken"
        assert not sum(row["torch"] for row in counts), counts
    for a, b in zip(got, want, strict=True):
        if b is None:  # an undefined tensor
            assert a is None
            continue
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
        assert a.stride() == b.stride() or a.numel() == 0, (a.stride(), b.stride())
