"""Group sizes other than 128: values that share a scale become the rows of a view, and have one scale each.

A group of a row is a row of the view as it is; a square block has to be copied into one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator.arguments import check_integer


def _check(shape: tuple[int, ...], granularity: str, size: int, scale_layout: str, plain: bool) -> None:
    if check_integer("group_size", size) < 1:
        raise ArgumentError(f"group_size is {size}; expected 1 or more")
    if granularity not in ("group", "block") or scale_layout != "row" or not plain:
        raise ArgumentError(
            f"group_size is {size}; expected 128 unless granularity is 'group' or 'block', scales are computed, and "
            f"layout and scale_layout are 'row'"
        )
    sides = shape[-1:] if granularity == "group" else (_rows(shape), shape[-1])
    if not shape or any(side % size for side in sides):
        raise ArgumentError(f"group_size is {size}; expected a divisor of {' and '.join(map(str, sides))}")


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for side in shape[:-1]:
        rows *= side
    return rows


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return ``[m / size, n / size, size * size]``: a copy of ``[m, n]`` with blocks as rows."""
    m, n = _rows(x.shape), x.shape[-1]
    view = x.reshape(m // size, size, n // size, size).transpose(1, 2)
    return view.reshape(m // size, n // size, size * size)


def _from_blocks(blocks: Tensor, size: int, shape: tuple[int, ...]) -> Tensor:
    down, across, _ = blocks.shape
    return blocks.view(down, across, size, size).transpose(1, 2).reshape(shape)


def quantize(
    by_rows: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, granularity: str, size: int, scale_layout: str,
    plain: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes and scales of groups of `size`; `by_rows` quantises with one scale per row."""
    _check(tuple(x.shape), granularity, size, scale_layout, plain)
    if granularity == "group":
        q, scale = by_rows(x.detach().reshape(*x.shape[:-1], x.shape[-1] // size, size))
        return q.view(x.shape), scale
    q, scale = by_rows(_blocks(x.detach(), size))
    return _from_blocks(q, size, tuple(x.shape)), scale


def dequantize(
    by_rows: Callable[[Tensor, Tensor], Tensor], q: Tensor, scale: Tensor, granularity: str, size: int,
    scale_layout: str,
) -> Tensor:  # fmt: skip
    """Return the values of codes whose scales belong to groups of `size`."""
    _check(tuple(q.shape), granularity, size, scale_layout, True)
    if granularity == "group":
        return by_rows(q.reshape(*q.shape[:-1], q.shape[-1] // size, size), scale).view(q.shape)
    return _from_blocks(by_rows(_blocks(q, size), scale), size, tuple(q.shape))
