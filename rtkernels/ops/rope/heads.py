"""Tensors of heads in memory, whatever their layout."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope.angles import LAYOUTS
from rtkernels.runtime.operator.declared import Meta


class Heads(NamedTuple):
    """A tensor of heads, whatever its layout. Strides in elements."""

    batch: int
    length: int
    heads: int
    head_dim: int
    batch_stride: int
    place_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self[4:]


def heads_of(name: str, meta: Meta, layout: str) -> Heads:
    """Return the tensor as ``[batch, length, heads, head_dim]``; three dimensions are packed tokens."""
    shape, stride = meta[1:3]
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if len(shape) == 3:
        return Heads(1, *shape, 0, *stride[:2])
    if len(shape) != 4:
        raise ArgumentError(f"{name} has shape {tuple(shape)}; expected 4 dimensions ({layout}), or 3 (packed tokens)")
    order = LAYOUTS[layout]
    return Heads(*(shape[i] for i in order), shape[3], *(stride[i] for i in order))


def as_heads(t: Tensor, layout: str) -> Tensor:
    """Return a view ``[batch, length, heads, head_dim]``."""
    return t.unsqueeze(0) if t.dim() == 3 else t.permute(*LAYOUTS[layout], 3)


def from_heads(t: Tensor, layout: str, packed: bool) -> Tensor:
    """Return such a view as a dense tensor in a layout."""
    if packed:
        return t.squeeze(0).contiguous()
    return t.permute(*(LAYOUTS[layout].index(i) for i in range(3)), 3).contiguous()


def shape_in(layout: str, heads: Heads, packed: bool) -> tuple[int, ...]:
    """Return the shape of a dense tensor of these heads in a layout."""
    if packed:
        return (heads.length, heads.heads, heads.head_dim)
    shape = [0, 0, 0, heads.head_dim]
    for i, size in zip(LAYOUTS[layout], heads[:3], strict=True):
        shape[i] = size
    return tuple(shape)
