"""Elements that are not 0, in order: their coordinates, or elements of another tensor; and indices repeated by counts.

The number of results is read by the host, one time in a call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rtkernels.ops.scan.running import running
from rtkernels.ops.shared.strided import TOKEN
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import allocator, kept_zeros
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_SLICE = 4096  # elements of a block
_TYPES = [(t,) for t in ("bf16", "fp16", "fp32", "i64", "i32", "u8")]
_COUNT = Kernel(
    "scan/compact.cu", "compact_count", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args="x:ptr ends:ptr total:ptr ticket:ptr n:i64 aligned:i64 distinct:i64",
)  # fmt: skip
_PLACE = Kernel(
    "scan/compact.cu", "compact_place", template="T", variants=_TYPES, max_registers=72, tier="aten",
    args="x:ptr ends:ptr source:ptr out:ptr out_col:i64 n:i64 aligned:i64 item_bytes:i64 rank:i64 size1:i64 size2:i64 "
    "size3:i64 divider1:i64 divider2:i64 divider3:i64 distinct:i64",
)  # fmt: skip
_REPEAT = Kernel(
    "scan/compact.cu", "repeat_place", template="I", args="ends:ptr out:ptr count:i64 total:i64",
    variants=[("i32",), ("i64",)], max_registers=40, tier="aten",
)  # fmt: skip

_TOTAL = Kernel(
    "scan/compact.cu", "repeat_total", template="THREADS", variants=[(_THREADS,)], max_registers=32, tier="aten",
    args="ends:ptr found:ptr count:i64",
)  # fmt: skip


# The host reads the number of results between two launches. So the plan of a primitive is a function that launches, and
# its declared outputs are the largest possible ones.


def _counting(x: Meta, device: int, *, distinct: bool = False) -> Callable[[int], tuple[Tensor, int]]:
    """Return a function of x's address: the number of chosen elements up to the end of each slice, and of all."""
    n, slices = x.numel(), -(-x.numel() // _SLICE)
    ending = n, int(not x.misaligned), int(distinct)
    launch = _COUNT.bind((TOKEN[x.dtype],), device, slices, _THREADS, ending=ending)
    allocate, layout = allocator(device), ((slices,), (1,), torch.int64)

    def count(address: int) -> tuple[Tensor, int]:
        ends, total = allocate(*layout), allocate((), (), torch.int64)
        launch(address, ends.data_ptr(), total.data_ptr(), kept_zeros(device, 1).data_ptr())
        return ends, total.item()

    return count


def _placing(x: Meta, source: Meta | None, device: int, *, distinct: bool = False) -> Launch:
    """Return the launch that writes the chosen elements of `source`, or without it the coordinates of those of x.

    It takes the addresses of x, ends, source (or 0) and out, and the number of chosen elements.
    """
    rank, sizes, item_bytes = x.dim(), (*x.shape[1:], 1, 1, 1)[:3], 0
    if source is not None:
        rank, sizes, item_bytes = 1, (1, 1, 1), source.dtype.itemsize
    ending = x.numel(), int(not x.misaligned), item_bytes, rank, *sizes, *map(divisor, sizes), int(distinct)
    return _PLACE.bind((TOKEN[x.dtype],), device, -(-x.numel() // _SLICE), _THREADS, ending=ending)


def _plan_nonzero(x: Meta, device: int) -> Steps:
    count, place = _counting(x, device), _placing(x, None, device)
    allocate, rank = allocator(device), x.dim()

    def run(x: Tensor) -> Tensor:
        address = x.data_ptr()
        ends, total = count(address)
        out = allocate((total, rank), (1, total or 1), torch.int64)
        if total:
            place(address, ends.data_ptr(), 0, out.data_ptr(), total)
        return out

    return Steps(instead=run)


def _plan_chosen(mask: Meta, source: Meta, device: int) -> Steps:
    count, place = _counting(mask, device), _placing(mask, source, device)
    allocate, dtype = allocator(device), source.dtype

    def run(mask: Tensor, source: Tensor) -> Tensor:
        address = mask.data_ptr()
        ends, total = count(address)
        out = allocate((total,), (1,), dtype)
        if total:
            place(address, ends.data_ptr(), source.data_ptr(), out.data_ptr(), total)
        return out

    return Steps(instead=run)


def _plan_distinct(ordered: Meta, places: bool, device: int) -> Steps:
    count, place = _counting(ordered, device, distinct=True), _placing(ordered, ordered, device, distinct=True)
    place_indices = _placing(ordered, None, device, distinct=True) if places else None
    allocate, dtype = allocator(device), ordered.dtype

    def run(ordered: Tensor, _: bool) -> tuple[Tensor, Tensor | None]:
        address = ordered.data_ptr()
        ends, total = count(address)  # at least 1
        values, at = allocate((total,), (1,), dtype), None
        place(address, ends.data_ptr(), address, values.data_ptr(), total)
        if place_indices is not None:
            at = allocate((total,), (1,), torch.int64)
            place_indices(address, ends.data_ptr(), 0, at.data_ptr(), total)
        return values, at

    return Steps(instead=run)


_NONZERO = Primitive(
    "nonzero", (Dense("x", None),), results="out", plan=_plan_nonzero,
    outputs=lambda x: (Memory((x.numel(), x.dim()), torch.int64),),
)  # fmt: skip
_CHOSEN = Primitive(
    "chosen", (Dense("mask", None), Dense("source", None)), results="out", plan=_plan_chosen,
    outputs=lambda source: (Memory((source.numel(),), source.dtype),),
)  # fmt: skip
_DISTINCT = Primitive(
    "distinct", (Dense("ordered", None),), "places", results="values at", plan=_plan_distinct,
    outputs=lambda ordered: (Memory(ordered.shape, ordered.dtype), Memory(ordered.shape, torch.int64)),
)  # fmt: skip


def _plan_repeat(ends: Meta, dtype: torch.dtype, total: int, device: int) -> Steps:
    launch = _REPEAT.bind((TOKEN[dtype],), device, -(-total // _THREADS), _THREADS)
    return Steps(Step(launch, "ends", "out", ends.shape[0], total))


def _plan_total(ends: Meta, device: int) -> Steps:
    launch = _TOTAL.bind((_THREADS,), device, -(-ends.shape[0] // _THREADS), _THREADS)
    return Steps(Step(launch, "ends", "found", ends.shape[0]))


_FOUND = Primitive(
    "repeat_total", (Dense("ends", None),), results="found", plan=_plan_total,
    outputs=lambda ends: (Memory((2,), torch.int64, zero=True),),
)  # fmt: skip
_REPEATED = Primitive(
    "repeated", (Dense("ends", None),), "dtype, total", results="out",
    outputs=lambda ends, dtype, total: (Memory((total,), dtype),), plan=_plan_repeat,
)  # fmt: skip


def nonzero(x: Tensor) -> Tensor:
    """Return the coordinates of elements that are not 0, in row-major order.

    Args:
        x: bfloat16, float16, float32, int64, int32, uint8 or bool; one to four dimensions, not empty, all but the
            first below 2^30.

    Returns:
        (count, dimensions), int64; its columns lie side by side, as torch's do.
    """
    return _NONZERO(x)


def chosen(source: Tensor, mask: Tensor) -> Tensor:
    """Return the elements of `source` whose mask is set, in row-major order; both have one shape, and are not empty.

    Args:
        source: Elements of 1, 2, 4 or 8 bytes.
        mask: bool.

    Returns:
        One dimension, source's dtype.
    """
    return _CHOSEN(mask, source)


def distinct(ordered: Tensor, *, places: bool) -> tuple[Tensor, Tensor | None]:
    """Return the elements that differ from the one before them, and on request where they are.

    Args:
        ordered: One dimension, dense, not empty; dtypes as for ``nonzero``.
        places: Return these too.

    Returns:
        Values, and int64 places or None.
    """
    return _DISTINCT(ordered, places)


def repeated(repeats: Tensor, total: int | None) -> Tensor | None:
    """Return each index i of `repeats` as often as repeats[i] says.

    Args:
        repeats: int32 or int64, one dimension, not empty.
        total: Their sum, if it is known: then the kernel stops if it is another one, or a repeat is negative.

    Returns:
        One dimension, repeats' dtype; None if a repeat is negative.
    """
    ends, _ = running(repeats, "sum", 0)
    if total is None:
        total, negative = _FOUND(ends).tolist()
        if negative:
            return None
    return _REPEATED(ends, repeats.dtype, total)


OP = Op("compact", public=(), kernels=(_COUNT, _PLACE, _REPEAT, _TOTAL), torch_ops=())
__all__ = ["OP", "chosen", "distinct", "nonzero", "repeated"]
