"""Rows added to the rows that an index names: what index_add, scatter_add and index_put share."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.index.row_moves_plan import LIMIT, plan_scatter_into
from rtkernels.ops.shared.strided import TOKEN, product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import is_dense, vector_bytes
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta, Primitive, Rows
from rtkernels.runtime.operator.kinds import meta_of
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

MAX_TOKENS = 8192  # every block reads all of their indices
MAX_BYTES = 84 << 20  # read and written; beyond, a sort and windows of equal work are faster
_FREE_BYTES = 1 << 23  # of indices, in all blocks
_THREADS = 256
_WARPS = 8  # of a block
_MAX_ROWS = 128  # of a block
_NONE = -(1 << 63)
_BLOCKS = 3  # of an SM, in one wave
_ADD = Kernel(
    "index/add_rows.cu", "add_rows", template="T VEC", max_registers=80, tier="aten",
    variants=[(t, v) for t, n in (("bf16", 8), ("fp16", 8), ("fp32", 4)) for v in (n, 1)],
    args="x:ptr index:ptr source:ptr out:ptr tokens:i64 rows:i64 rows_per_block:i64 units:i64 lane_bits:i64 "
    "source_stride:i64 index_stride:i64 index_int64:i64 from_end:i64 ignored:i64 share:i64 copies:i64 slice_bits:i64 "
    "factor:f64",
)  # fmt: skip


def _source_stride(source: Meta, dim: int) -> int | None:
    """Return the distance of the rows of `source`; None if they are not at one, or have gaps."""
    if is_dense(source):
        return product(source.shape[dim + 1 :])
    return source.stride[0] if source.dim() == 2 and dim == 0 and source.stride[1] == 1 else None


def _tiling(outer: int, rows: int, units: int, processors: int) -> tuple[int, int, int, int]:
    """Return rows of a block, bits of the lanes of a row and of the accesses of a lane, and slices of the columns.

    Slices are narrow enough for eight blocks to share a row, as one may be named by all indices.
    """
    bits = min(max(units - 1, 0).bit_length(), 5)
    slice_bits = min(max((units >> 8).bit_length() - 1, 0), 2)
    slices = -(-units // (1 << bits + slice_bits))
    stretches = max(1, _BLOCKS * processors // (outer * slices))
    return min(-(-rows // stretches), _MAX_ROWS), bits, slice_bits, slices


def addable(
    shape: tuple[int, ...], index: Tensor, source: Tensor, dim: int, *, in_place: bool = False, reads: bool = True
) -> bool:
    """Return False for what the kernel does not take, or is slow for: rows of less than 64 bytes, many tokens, and so
    many rows that blocks would read more indices than elements.

    Args:
        shape: Of the result, which is dense.
        index: As for ``add_rows``.
        source: As for ``add_rows``.
        dim: As for ``add_rows``.
        in_place: Rows that no index names are left alone.
        reads: The sums are added to something.
    """
    inner, outer, tokens, size = product(shape[dim + 1 :]), product(shape[:dim]), index.numel(), source.element_size()
    stretches = -(-shape[dim] // _MAX_ROWS)
    if tokens > MAX_TOKENS or max(outer, stretches) > 65535 or inner * size < 64:
        return False
    blocks = outer * stretches * -(-inner * size // 1024)
    moved = size * (3 * source.numel() + (0 if in_place else (1 + reads) * product(shape)))
    if moved > MAX_BYTES or blocks * tokens * 8 > max(_FREE_BYTES, moved):
        return False
    return _source_stride(meta_of(source), dim) is not None


def _steps(
    x: str | int, out: str, shape: tuple[int, ...], off: int, index: Meta, source: Meta, dim: int, from_end: bool,
    ignored: int, device: int, alpha: str | float = "alpha",
) -> Steps:  # fmt: skip
    """Return the launch. `off` are the bits by which x is not aligned."""
    size, inner, outer, rows = source.dtype.itemsize, product(shape[dim + 1 :]), product(shape[:dim]), shape[dim]
    stride, tokens = _source_stride(source, dim), index.numel()
    vec = 16 // size if vector_bytes(off | source.misaligned, inner * size, stride * size) == 16 else 1
    units = inner // vec
    per_block, bits, slice_bits, slices = _tiling(outer, rows, units, device_info(device).sm_count)
    share = -(-tokens // (_WARPS * 32)) * 32
    shared = 4 * _WARPS * share + 2 * (-(-tokens // 8) * 8)
    launch = _ADD.bind((TOKEN[source.dtype], vec), device, (slices, -(-rows // per_block), outer), _THREADS, shared)
    numbers = tokens, rows, per_block, units, bits, stride, index.stride[0], int(index.dtype == torch.int64)
    numbers += int(from_end), ignored, share, int(x != out), slice_bits
    return Steps(Step(launch, x, "index", "source", out, *numbers, alpha))


def _plan(x: Meta, index: Meta, source: Meta, dim: int, from_end: bool, device: int) -> Steps:
    return _steps("x", "out", x.shape, x.misaligned, index, source, dim, from_end, _NONE, device)


def _plan_in_place(x: Meta, index: Meta, source: Meta, dim: int, from_end: bool, device: int) -> Steps:
    return _steps("x", "x", x.shape, x.misaligned, index, source, dim, from_end, _NONE, device)


def _plan_sums(index: Meta, source: Meta, rows: int, ignored: int, device: int) -> Steps:
    shape = rows, source.shape[1]
    return _steps(0, "out", shape, 0, index, source, 0, False, ignored, device, 1.0)


_OTHERS = Argument("index", None), Argument("source", None)
_ADDED = Primitive(
    "add_rows", (Argument("x", None), *_OTHERS), "dim, from_end, alpha", results="out", numbers="alpha",
    outputs=lambda x: (Memory(x.shape, x.dtype),), plan=_plan,
)  # fmt: skip
_ADDED_IN_PLACE = Primitive(
    "add_rows_in_place", (InPlace("x", None), *_OTHERS), "dim, from_end, alpha", results="", numbers="alpha",
    plan=_plan_in_place,
)  # fmt: skip
_SORTED_IN_PLACE = Primitive(
    "add_sorted_rows", (InPlace("out", None), Rows("x", None), Dense("indices", None)), results="",
    plan=lambda out, x, indices, device: plan_scatter_into(out, x, indices, None, True, device),
)  # fmt: skip
_SUMMED = Primitive(
    "sum_rows", _OTHERS, "rows, ignored", results="out", plan=_plan_sums,
    outputs=lambda source, rows: (Memory((rows, source.shape[1]), source.dtype),),
)  # fmt: skip


def add_rows(
    x: Tensor, index: Tensor, source: Tensor, dim: int, *, from_end: bool = False, alpha: float = 1.0,
    in_place: bool = False,
) -> Tensor:  # fmt: skip
    """Return x with the slices of `source` along `dim` added to those that an index names.

    Sums are made in fp32 in the order of the index, and rounded one time.

    Args:
        x: bfloat16, float16 or float32, dense, not empty.
        index: int32 or int64 of one dimension and any stride, up to ``MAX_TOKENS``.
        source: Of x's dtype and shape, with the index's size along `dim`; see ``addable``.
        dim: At least 0.
        from_end: Negative indices count from the end.
        alpha: Multiplies what is added, in fp32.
        in_place: Write to x, which shares no memory with `source`.

    Returns:
        Dense; x if `in_place`.
    """
    if in_place:
        _ADDED_IN_PLACE(x, index, source, dim, from_end, alpha)
        return x
    return _ADDED(x, index, source, dim, from_end, alpha)


def add_many_rows(x: Tensor, index: Tensor, source: Tensor) -> None:
    """Add the rows of `source` to those of x that an index names: sorted by it first, for any number of them.

    Sums are made in fp32 in the order of the index. Rows that an index outside of x names are left out.

    Args:
        x: bfloat16, float16 or float32, ``[rows, columns]``, dense, not empty; written.
        index: int32 or int64, one for each row of `source`.
        source: Of x's dtype, ``[tokens, columns]``; shares no memory with x.
    """
    if max(x.shape[0], source.shape[0]) > LIMIT:
        raise OverflowError("more rows than are counted in 31 bits")
    _SORTED_IN_PLACE(x, source, index)


def sum_rows(index: Tensor, source: Tensor, rows: int, ignored: int) -> Tensor:
    """Return the sums of the rows of `source` that have the same index, zeros where there are none.

    Args:
        index: As for ``add_rows``.
        source: Two dimensions, else as for ``add_rows``.
        rows: Of the result.
        ignored: An index that no row is added for.

    Returns:
        Dense ``[rows, columns]``.
    """
    return _SUMMED(index, source, rows, ignored)


OP = Op("adding", public=(), kernels=(_ADD,), torch_ops=())
__all__ = ["MAX_TOKENS", "OP", "add_many_rows", "add_rows", "addable", "sum_rows"]
