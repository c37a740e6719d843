"""Operands that are broadcast over rows: one row for all, or for several neighbouring ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.declared import Meta


def by_rows(name: str, t: Tensor | None, shape: Sequence[int], of: str = "x") -> Tensor | None:
    """Return an operand that broadcasts to `shape` as rows, each for as many neighbouring rows of it.

    ``[n]`` becomes ``[1, n]``, ``[batch, 1, n]`` ``[batch, n]``; other ways to broadcast cost a copy.
    """
    if t is None:
        return None
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{name} is a {type(t).__name__}; expected a torch.Tensor or None")
    shape, given = tuple(shape), tuple(t.shape)
    lead = (1,) * (len(shape) - len(given)) + given
    fits = len(given) <= len(shape) and all(a in (1, b) for a, b in zip(lead[:-1], shape[:-1], strict=True))
    if not given or given[-1] != shape[-1] or not fits:
        raise ArgumentError(f"{name} has shape {given}; expected one that broadcasts to {shape}, that of {of}")
    outer = lead[:-1]
    while outer and outer[-1] == 1:
        outer = outer[:-1]
    if outer == shape[: len(outer)]:
        return t.reshape(*outer, shape[-1]) if outer else t.reshape(1, shape[-1])
    return t.reshape(lead).expand(shape).contiguous()


def cycled_rows(t: Tensor, shape: Sequence[int]) -> int:
    """Return how many rows ``[..., n]``, the last dimensions of `shape`, repeat over it; 0 if they do not."""
    rows = row_count(t.shape)
    return rows if tuple(t.shape) == tuple(shape[len(shape) - t.dim() :]) else 0


def check_rows(name: str, meta: Meta | None, rows: int, cols: int, of: str = "x") -> None:
    """Raise an ArgumentError unless each row of an operand belongs to as many rows of another tensor."""
    if meta is None:
        return
    count = row_count(meta.shape) if meta.shape else 0
    if not meta.shape or meta.shape[-1] != cols or (rows and (count == 0 or rows % count)):
        raise ArgumentError(
            f"{name} has shape {tuple(meta.shape)}; expected rows of {cols}, as many as a part of the {rows} of {of}"
        )
