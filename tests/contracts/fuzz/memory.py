"""Tensors of a chosen layout, inside guarded memory.

Every tensor lies in memory of its own, between guard zones. All bytes that belong to no element are 0xFF: NaN in every
float format, -1 in integers, so that a read outside of the tensor shows in the results and a write in ``Arena.damage``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GUARD = 1024  # bytes on both sides, a multiple of every alignment that kernels ask for


class Layout(NamedTuple):
    """The layout of a tensor.

    Attributes:
        name: As variations and reports call it.
        strides: In elements.
        offset: First element, in elements after a multiple of 16 bytes.
        shared: Several elements share an address, so that values differ from the requested ones.
        negated: Memory holds the opposite values (a lazy negative).
    """

    name: str
    strides: tuple[int, ...]
    offset: int = 0
    shared: bool = False
    negated: bool = False


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def layouts(t: Tensor, *, shared: bool = True) -> Iterator[Layout]:
    """Yield the layouts to try a tensor in.

    Args:
        t: Its shape and dtype decide which there are.
        shared: Also those in which elements share memory.
    """
    shape, n = tuple(t.shape), t.dim()
    yield Layout("off", dense(shape), 1)
    if t.is_floating_point() and t.itemsize > 1:
        yield Layout("neg", dense(shape), negated=True)
    if not n or not t.numel():
        return
    many = [d for d in range(n) if shape[d] > 1]
    for d in range(n):
        doubled = [size * (1 + (i == d)) for i, size in enumerate(shape)]
        yield Layout(f"step{d}", tuple(s * (1 + (i == d)) for i, s in enumerate(dense(doubled))))
    for name, extra in (("pitch1", 1), ("pitch3", 3), ("pitch16", -(-16 // t.itemsize))):
        if n > 1:
            yield Layout(name, (*dense((*shape[:-1], shape[-1] + extra))[:-1], 1))
    for a, b in {(n - 2, n - 1), (0, n - 1), (0, 1)} if n > 1 else ():
        if 0 <= a < b and shape[a] > 1 and shape[b] > 1:
            order = [*range(n)]
            order[a], order[b] = order[b], order[a]
            yield Layout(f"swap{a}{b}", permuted(shape, order))
    if n > 2:
        yield Layout("reversed", permuted(shape, [*reversed(range(n))]))
    if not shared:
        return
    for d in many:
        kept = [1 if i == d else size for i, size in enumerate(shape)]
        yield Layout(f"expand{d}", tuple(0 if i == d else s for i, s in enumerate(dense(kept))), shared=True)
    if len(many) > 1:
        yield Layout("expand", (0,) * n, shared=True)
        yield Layout("expandrows", (*(0,) * (n - 1), 1), shared=True)
    if n > 1 and shape[-2] > 1:
        for step in (1, 3, 8):
            if step < shape[-1]:
                span = (shape[-2] - 1) * step + shape[-1]
                outer = dense((*shape[:-2], span))[:-1]
                yield Layout(f"windows{step}", (*outer, step, 1), shared=True)


def permuted(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor with its dimensions in this order in memory."""
    steps = dense([shape[i] for i in order])
    strides = [0] * len(shape)
    for place, i in enumerate(order):
        strides[i] = steps[place]
    return tuple(strides)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the extent from the first to the last element, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


class Arena:
    """Memory with one or more tensors in it, and what it held when the call began."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.bytes = torch.full((GUARD + nbytes + GUARD,), 0xFF, dtype=torch.uint8, device=device)
        self._before: Tensor | None = None
        self._may_change = torch.zeros(0)

    def at(self, start: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor that begins `start` bytes after the first guard zone."""
        typed = self.bytes[GUARD + start :]
        typed = typed[: typed.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(tuple(shape), tuple(strides), typed.storage_offset())

    def watch(self, *written: Tensor) -> None:
        """Save the contents; everything except the elements of some tensors must stay unchanged."""
        self._before = self.bytes.clone()
        self._may_change = torch.zeros_like(self.bytes, dtype=torch.bool)
        for t in written:
            if t.numel():
                first = t.data_ptr() - self.bytes.data_ptr()
                strides = (*(s * t.itemsize for s in t.stride()), 1)
                self._may_change.as_strided((*t.shape, t.itemsize), strides, first).fill_(True)

    def damage(self) -> int:
        """Return how many bytes changed that must not change."""
        return int(((self.bytes != self._before) & ~self._may_change).sum())


def placed(value: Tensor, layout: Layout | None, device: str) -> tuple[Tensor, Arena]:
    """Return a tensor with the values of `value` (or some of them, where elements share memory), and its memory."""
    how = layout or Layout("dense", dense(value.shape))
    arena = Arena((span(value.shape, how.strides) + how.offset) * value.itemsize, device)
    t = arena.at(how.offset * value.itemsize, value.shape, how.strides, value.dtype)
    fill(t, -value if how.negated else value, shared=how.shared)
    return (torch._neg_view(t) if how.negated else t), arena


def fill(t: Tensor, value: Tensor, *, shared: bool) -> None:
    """Write values to a tensor; where elements share memory, the first ones in the order of addresses."""
    if not t.numel():
        return
    value = value.to(t.device)
    if not shared:
        as_bytes(t).copy_(as_bytes(value.contiguous()))
        return
    count = span(t.shape, t.stride())
    flat = t.as_strided((count,), (1,), t.storage_offset())
    as_bytes(flat).copy_(as_bytes(value.reshape(-1)[torch.arange(count, device=t.device) % value.numel()]))


def as_bytes(t: Tensor) -> Tensor:
    """Return a tensor as integers of its size: copies keep the bits of NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.view(kinds[t.itemsize]) if t.itemsize in kinds else t
