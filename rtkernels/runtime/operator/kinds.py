"""Kinds of tensor arguments in an operator's declaration, which determine checks and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, check_same, is_dense, row_count, row_stride, token


class Meta(NamedTuple):
    """The metadata of a tensor that plans may depend on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: int
    misaligned: int  # its address modulo 16

    def numel(self) -> int:
        """Return the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return row_count(self.shape)

    @property
    def row_stride(self) -> int | None:
        """Distance between rows in elements; None unless rows are unit-stride and evenly spaced."""
        return row_stride(self.shape, self.stride)

    @property
    def token(self) -> str:
        """The template argument for the dtype."""
        return DTYPE_TOKEN[self.dtype]


def meta_of(tensor: Tensor | None) -> Meta | None:
    """Return the metadata that checks of an operator take, for callers that check before they call it."""
    if tensor is None:
        return None
    return Meta(tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), 0)


def dense_as(meta: Meta, dtype: torch.dtype) -> Meta:
    """Return the metadata of a tensor after a conversion (``Steps.converted``): dense, in new memory."""
    return Meta(dtype, meta.shape, dense_strides(meta.shape), meta.device, 0)


def misaligned(*metas: Meta | None) -> int:
    """Return 0 if the addresses of all tensors are multiples of 16, otherwise the union of their low bits."""
    bits = 0
    for meta in metas:
        if meta is not None:
            bits |= meta.misaligned
    return bits


def is_vectorised(meta: Meta) -> bool:
    """Return True if a tensor's rows begin at multiples of 16 bytes, unless those of no dense tensor would."""
    size = meta.dtype.itemsize
    if meta.misaligned or not meta.shape or meta.shape[-1] * size % 16:
        return not meta.misaligned or 0 in meta.shape
    steps = [step for n, step in zip(meta.shape, meta.stride, strict=True) if n > 1]
    return all(step in (0, 1) or step * size % 16 == 0 for step in steps)


class Argument:
    """A tensor argument with any strides.

    Args:
        name: Its name in the schema and in messages.
        dtypes: Accepted dtypes; None if the operator's `check` decides.
        like: Name of another argument with the same dtype, and with the same shape unless `shape` is given.
        shape: Returns the required shape from the metas of all arguments by name.
        of: What messages name as the source of the shape.
        optional: May be None.
        over: For an argument that is overwritten: names of arguments that may be the same memory with the same layout.
            It must not share memory with any other argument.
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
        """Return False if the operator must copy the tensor before planning."""
        return True

    def copied(self, t: Tensor) -> Tensor:
        """Return a copy that fits."""
        return t.clone(memory_format=torch.contiguous_format)

    def check(self, given: dict[str, Any]) -> None:
        """Raise an ArgumentError for a wrong dtype or shape. `given`: metas and options by name."""
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
    """An argument whose rows (the last dimension) are unit-stride and evenly spaced; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return not meta.shape or row_stride(meta.shape, meta.stride) is not None


class UnitStride(Argument):
    """An argument whose last dimension has unit stride; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return meta.shape[-1] <= 1 or meta.stride[-1] == 1


class Dense(Argument):
    """A contiguous argument; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return is_dense(meta)


class Aligned(Dense):
    """A contiguous argument whose address is a multiple of 16; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return is_dense(meta) and meta.misaligned == 0


class DenseFloat(Dense):
    """A contiguous float32 argument; others are converted."""

    def fits(self, meta: Meta) -> bool:
        return meta.dtype == torch.float32 and is_dense(meta)

    def copied(self, t: Tensor) -> Tensor:
        return t.float().contiguous()


class Exact(Argument):
    """A contiguous argument; others are refused."""

    def check(self, given: dict[str, Any]) -> None:
        super().check(given)
        meta = given[self.name]
        if meta is not None and not is_dense(meta):
            raise ArgumentError(f"{self.name} has strides {tuple(meta.stride)}; expected a contiguous tensor")


class InPlace(Argument):
    """An argument that is overwritten, with any strides."""

    written = True


class InPlaceRows(Rows):
    """An argument that is overwritten; through a copy unless its rows are unit-stride and evenly spaced."""

    written = True


class InPlaceAligned(Aligned):
    """An argument that is overwritten; through a copy unless it is contiguous and its address is a multiple of 16.

    So the kernel, and with it every bit of the result, is the same as for a call that allocates its result.
    """

    written = True


class InPlaceExact(Exact):
    """A contiguous argument that is overwritten; others are refused."""

    written = True


class InPlaceVectors(InPlaceExact):
    """A contiguous argument that is overwritten; through a copy unless its address is a multiple of 16."""

    def fits(self, meta: Meta) -> bool:
        return meta.misaligned == 0
