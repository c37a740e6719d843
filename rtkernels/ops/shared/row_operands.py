"""Operands that are broadcast over rows: one row for all, or for several neighbouring ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator.declared import Meta


def rows_of(name: str, t: Tensor | None, shape: Sequence[int], of: str = "x") -> tuple[Tensor | None, bool]:
    """Return an operand that broadcasts to `shape` as rows, and whether they repeat.

    ``[n]`` becomes ``[1, n]`` and ``[batch, 1, n]`` ``[batch, n]``, each row for as many neighbouring ones; ``[length,
    n]`` and ``[1, length, n]`` come over and over. Other ways to broadcast cost a copy.
    """
    if t is None:
        return None, False
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{name} is a {type(t).__name__}; expected a torch.Tensor or None")
    shape, given = tuple(shape), tuple(t.shape)
    lead = (1,) * (len(shape) - len(given)) + given
    fits = len(given) <= len(shape) and all(a in (1, b) for a, b in zip(lead[:-1], shape[:-1], strict=True))
    if not given or tuple(given[-1:]) != tuple(shape[-1:]) or not fits:
        raise ArgumentError(f"{name} has shape {given}; expected one that broadcasts to {shape}, that of {of}")
    if lead == shape:
        return t.reshape(shape), False
    outer = lead[:-1]
    while outer and outer[-1] == 1:
        outer = outer[:-1]
    if outer == shape[: len(outer)]:
        return t.reshape(*(outer or (1,)), shape[-1]), False
    inner = lead
    while len(inner) > 1 and inner[0] == 1:
        inner = inner[1:]
    if inner == shape[len(shape) - len(inner) :]:
        return t.reshape(inner), True
    return t.reshape(lead).expand(shape).contiguous(), False


def by_rows(name: str, t: Tensor | None, shape: Sequence[int], of: str = "x") -> Tensor | None:
    """The same for kernels whose operands cannot repeat."""
    rows, cyclic = rows_of(name, t, shape, of)
    return rows.expand(tuple(shape)).contiguous() if cyclic else rows


def summed(grad: Tensor, like: Tensor) -> Tensor:
    """Return a gradient summed over the dimensions in which `like` was broadcast, in fp32, of its shape and dtype.

    The order of additions depends on the shapes only.
    """
    extra = grad.dim() - like.dim()
    dims = [*range(extra), *(i + extra for i, n in enumerate(like.shape) if n == 1 and grad.shape[i + extra] != 1)]
    if dims:
        grad = grad.sum(dims, keepdim=True, dtype=torch.float32).reshape(like.shape)
    return grad.to(like.dtype)


def check_rows(name: str, meta: Meta | None, rows: int, cols: int, of: str = "x") -> None:
    """Raise an ArgumentError unless each row of an operand belongs to as many rows of another tensor."""
    if meta is None:
        return
    count = meta.rows if meta.shape else 0
    if not meta.shape or meta.shape[-1] != cols or (rows and (count == 0 or rows % count)):
        raise ArgumentError(
            f"{name} has shape {tuple(meta.shape)}; expected rows of {cols}, as many as a part of the {rows} of {of}"
        )
