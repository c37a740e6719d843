"""Where the codes and scales of an fp8 matrix lie: by rows, transposed or both, dense or expert after expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.plan import Memory

GROUP = 128  # values that share a scale
LAYOUTS = ("row", "transposed", "both")
SCALE_LAYOUTS = ("row", "column")
E4M3 = torch.float8_e4m3fn
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_EXPERTS = 8192  # their table is in shared memory


def groups_of(size: int) -> int:
    """Return how many groups of 128 cover `size` elements."""
    return -(-size // GROUP)


def row_blocks_of(rows: int, experts: int | None) -> int:
    """Return the number of blocks of 128 rows; for rows of experts, the largest number possible."""
    return groups_of(rows) if experts is None else (rows + (GROUP - 1) * min(experts, rows)) // GROUP


def check_option(name: str, value: Any, accepted: Sequence[str]) -> None:
    """Raise an ArgumentError unless an option has one of the accepted values."""
    if value not in accepted:
        raise ArgumentError(f"{name} is {value!r}; expected one of {', '.join(map(repr, accepted))}")


class Fp8Layout(NamedTuple):
    """What the codes and scales of a tensor are, by name: q and scale of its rows, q_t and scale_t of its columns.

    For m rows (leading dimensions flattened) of n columns:

    * q has the tensor's shape; scale is ``[..., ceil(n/128)]``, or ``[ceil(n/128), m]`` with scales in columns, which
      is flat, one expert after the other, if there are experts;
    * q_t is ``[n, m]``, flat if there are experts; scale_t is ``[row blocks, n]``, where no block has rows of two.

    Attributes:
        shape: Of the tensor.
        layout: "row", "transposed", "both"; anything else for no codes.
        scale_layout: "row" or "column": how the scales of rows lie.
        experts: How many the rows belong to, None if to none.
        dtype: Of the codes.
    """

    shape: Sequence[int]
    layout: str
    scale_layout: str = "row"
    experts: int | None = None
    dtype: torch.dtype = E4M3

    @property
    def by_rows(self) -> bool:
        """Whether there are codes of rows."""
        return self.layout in ("row", "both")

    @property
    def transposed(self) -> bool:
        """Whether there are codes of columns."""
        return self.layout in ("transposed", "both")

    def outputs(self) -> tuple[Memory | None, Memory | None, Memory | None, Memory | None]:
        """Return q, scale, q_t and scale_t; None for those that were not requested."""
        shape, rows, cols = tuple(self.shape), row_count(self.shape), self.shape[-1]
        groups = groups_of(cols)
        by_rows = transposed = (None, None)
        if self.by_rows:
            scale = (*shape[:-1], groups)
            if self.scale_layout == "column":
                scale = (groups, rows) if self.experts is None else (groups * rows,)
            by_rows = Memory(shape, self.dtype), Memory(scale, torch.float32)
        if self.transposed:
            codes = (cols, rows) if self.experts is None else (cols * rows,)
            scale = row_blocks_of(rows, self.experts), cols
            transposed = Memory(codes, self.dtype), Memory(scale, torch.float32)
        return *by_rows, *transposed


def asked(layout: str, results: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Return q, scale, q_t and scale_t with None for those that a layout leaves out."""
    q, scale, q_t, scale_t = results
    if layout == "both":
        return q, scale, q_t, scale_t
    if layout == "row":
        return q, scale, None, None
    return (None, None, q_t, scale_t) if layout == "transposed" else (None, None, None, None)
