"""What an operator's declaration says of a tensor: its kind, from which checks and copies follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, check_same, is_dense, row_count, row_stride, token


class Meta(NamedTuple):
    """What a plan may know of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: int
    misaligned: int  # its address modulo 16

    def numel(self) -> int:
        """Return how many elements there are."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dim(self) -> int:
        """Return how many dimensions there are."""
        return len(self.shape)

    @property
    def rows(self) -> int:
        """How many rows there are: all dimensions but the last."""
        return row_count(self.shape)

    @property
    def row_stride(self) -> int | None:
        """The distance between rows in elements; None if they are not unit-stride rows, evenly spaced."""
        return row_stride(self.shape, self.stride)

    @property
    def token(self) -> str:
        """The template argument that stands for the dtype."""
        return DTYPE_TOKEN[self.dtype]


def meta_of(tensor: Tensor | None) -> Meta | None:
    """Return what checks of an operator see of a tensor, for callers that check before they call one."""
    if tensor is None:
        return None
    return Meta(tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), 0)


def dense_as(meta: Meta, dtype: torch.dtype) -> Meta:
    """Return what a tensor is after a conversion (``Steps.converted``): dense, and new memory."""
    return Meta(dtype, meta.shape, dense_strides(meta.shape), meta.device, 0)


def misaligned(*metas: Meta | None) -> int:
    """Return 0 if the addresses of all tensors are multiples of 16, else the bits that are not."""
    bits = 0
    for meta in metas:
        if meta is not None:
            bits |= meta.misaligned
    return bits


class Argument:
    """A tensor that an operator takes, whatever its strides are.

    Args:
        name: As in the schema and in messages.
        dtypes: Those that are accepted; None if the operator's `check` says.
        like: Name of another argument whose dtype this one has; its shape, too, unless `shape` says otherwise.
        shape: The shape it must have, from the metas of all arguments by name.
        of: What messages say that the shape belongs to.
        optional: May be None.
        over: Of one that is overwritten: names of arguments that it may be, the same memory seen alike. It may share no
            memory with others.
    """

    written = False

    def __init__(
        self, name: str, dtypes: Sequence[torch.dtype] | None = FLOAT_DTYPES, *, like: str | None = None,
        shape: Callable[..., tuple[int, ...]] | None = None, of: str | None = None, optional: bool = False,
        over: str = "",
    ) -> None:  # fmt: skip
        self.name, self.dtypes, self.like, self.optional = name, dtypes, like, optional
        self.over = tuple(over.split())
        self.shape, self.of = shape, of or like

    def fits(self, meta: Meta) -> bool:
        """Return False if the operator must copy the tensor before a plan can be made."""
        return True

    def copied(self, t: Tensor) -> Tensor:
        """Return a copy that fits."""
        return t.contiguous()

    def check(self, given: dict[str, Any]) -> None:
        """Raise an ArgumentError if dtype, shape or device will not do. `given`: metas and options by name."""
        meta = given[self.name]
        if meta is None or (self.dtypes is None and self.like is None and self.shape is None):
            return
        if self.like is not None:
            check_same(self.name, meta.dtype, given[self.like].dtype, "dtype", of=self.like)
        elif self.dtypes is not None:
            token(self.name, meta.dtype, self.dtypes)
        if self.shape is not None:
            check_same(self.name, tuple(meta.shape), tuple(self.shape(given)), "shape", of=self.of)
        elif self.like is not None:
            check_same(self.name, tuple(meta.shape), tuple(given[self.like].shape), "shape", of=self.like)


class Rows(Argument):
    """One whose rows (the last dimension) are unit-stride and evenly spaced; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return not meta.shape or row_stride(meta.shape, meta.stride) is not None


class UnitStride(Argument):
    """One whose last dimension has unit stride; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return meta.shape[-1] <= 1 or meta.stride[-1] == 1


class Dense(Argument):
    """A contiguous one; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return is_dense(meta)


class Aligned(Dense):
    """A contiguous one whose address is a multiple of 16; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return is_dense(meta) and meta.misaligned == 0

    def copied(self, t: Tensor) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format)


class DenseFloat(Dense):
    """A contiguous float32 one; others are converted."""

    def fits(self, meta: Meta) -> bool:
        return meta.dtype == torch.float32 and is_dense(meta)

    def copied(self, t: Tensor) -> Tensor:
        return t.float().contiguous()


class Exact(Argument):
    """A contiguous one; others are refused."""

    def check(self, given: dict[str, Any]) -> None:
        super().check(given)
        meta = given[self.name]
        if meta is not None and not is_dense(meta):
            raise ArgumentError(f"{self.name} has strides {tuple(meta.stride)}; expected a contiguous tensor")


class InPlace(Argument):
    """One that the operator overwrites, whatever its strides are."""

    written = True


class InPlaceRows(Rows):
    """One that the operator overwrites; if its rows are not unit-stride and evenly spaced, by way of a copy."""

    written = True


class OwnRows(InPlaceRows):
    """The same; its rows must not overlap."""

    def check(self, given: dict[str, Any]) -> None:
        super().check(given)
        meta = given[self.name]
        stride = meta.row_stride if meta.rows > 1 else None
        if stride is not None and abs(stride) < meta.shape[-1]:
            raise ArgumentError(f"{self.name} has overlapping rows; in_place needs memory of its own for every element")


class InPlaceDense(Aligned):
    """One that the operator overwrites; if it is not contiguous, or its address no multiple of 16, by way of a copy.

    So the kernel, and with it the bits of the result, are those of a call that makes its own memory.
    """

    written = True


class InPlaceAligned(Aligned):
    """One that the operator overwrites; if it is not contiguous at a multiple of 16 bytes, by way of a copy."""

    written = True


class InPlaceExact(Exact):
    """One that the operator overwrites, contiguous."""

    written = True


class InPlaceVectors(InPlaceExact):
    """One that the operator overwrites, contiguous; if its address is no multiple of 16, by way of a copy."""

    def fits(self, meta: Meta) -> bool:
        return meta.misaligned == 0

    def copied(self, t: Tensor) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format)
