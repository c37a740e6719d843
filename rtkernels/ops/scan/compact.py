"""Elements that are not 0, in order: their coordinates, or elements of another tensor; and indices repeated by counts.

The number of results is read by the host, one time in a call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.scan.running import running
from rtkernels.ops.shared.strided import TOKEN
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import allocator, kept_zeros
from rtkernels.runtime.launch.plans import Plans
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
    args="x:ptr ends:ptr source:ptr out:ptr n:i64 aligned:i64 item_bytes:i64 rank:i64 size1:i64 size2:i64 size3:i64 "
    "divider1:i64 divider2:i64 divider3:i64 distinct:i64 out_col:i64",
)  # fmt: skip
_REPEAT = Kernel(
    "scan/compact.cu", "repeat_place", template="I", args="ends:ptr out:ptr count:i64 total:i64",
    variants=[("i32",), ("i64",)], max_registers=40, tier="aten",
)  # fmt: skip

_TOTAL = Kernel(
    "scan/compact.cu", "repeat_total", template="THREADS", variants=[(_THREADS,)], max_registers=32, tier="aten",
    args="ends:ptr found:ptr count:i64",
)  # fmt: skip


def _plan_count(device: int, dtype: torch.dtype, n: int, aligned: bool, distinct: bool) -> tuple[Any, ...]:
    """Return how to allocate the ends of slices, and the launch: no primitive, as the host's time decides here."""
    slices = -(-n // _SLICE)
    launch = _COUNT.bind((TOKEN[dtype],), device, slices, _THREADS, ending=(n, int(aligned), int(distinct)))
    return allocator(device), ((slices,), (1,), torch.int64), launch


_COUNTS = Plans(_plan_count)


def _plan_place(
    dtype: torch.dtype, shape: tuple[int, ...], aligned: bool, distinct: bool, device: int
) -> tuple[Any, ...]:
    """Return the launch and its numbers, which do not depend on how many elements there are: that is new each time."""
    n, rank = math.prod(shape), len(shape)
    sizes = (*shape[1:], *[1] * (4 - rank))[:3]
    launch = _PLACE.bind((TOKEN[dtype],), device, -(-n // _SLICE), _THREADS)
    return launch, (n, int(aligned)), (rank, *sizes, *map(divisor, sizes), int(distinct))


_PLACES = Plans(_plan_place)


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


def _ends(x: Tensor, distinct: bool = False) -> tuple[Tensor, int]:
    device, address = x.get_device(), x.data_ptr()
    allocate, memory, launch = _COUNTS[device, x.dtype, x.numel(), not address & 15, distinct]
    ends, total = allocate(*memory), allocate((), (), torch.int64)
    launch(address, ends.data_ptr(), total.data_ptr(), kept_zeros(device, 1).data_ptr())
    return ends, total.item()


def _place(
    x: Tensor, ends: Tensor, source: Tensor | None, out: Tensor, shape: tuple[int, ...], distinct: bool = False
) -> Tensor:
    """Write what the chosen elements of x stand for, coordinates in `shape` or elements of `source`, to `out`."""
    if not out.numel():
        return out
    launch, before, after = _PLACES[x.dtype, shape, x.data_ptr() & 15 == 0, distinct, x.get_device()]
    item_bytes = 0 if source is None else source.element_size()
    address = 0 if source is None else source.data_ptr()
    launch(x.data_ptr(), ends.data_ptr(), address, out.data_ptr(), *before, item_bytes, *after, out.shape[0])
    return out


def nonzero(x: Tensor) -> Tensor:
    """Return the coordinates of elements that are not 0, in row-major order.

    Args:
        x: bfloat16, float16, float32, int64, int32, uint8 or bool; one to four dimensions, not empty, all but the
            first below 2^30.

    Returns:
        (count, dimensions), int64; its columns lie side by side, as torch's do.
    """
    x = x if x.is_contiguous() else x.contiguous()
    ends, total = _ends(x)
    out = allocator(x.get_device())((total, x.dim()), (1, max(total, 1)), torch.int64)
    return _place(x, ends, None, out, tuple(x.shape))


def chosen(source: Tensor, mask: Tensor) -> Tensor:
    """Return the elements of `source` whose mask is set, in row-major order; both have one shape, and are not empty.

    Args:
        source: Elements of 1, 2, 4 or 8 bytes.
        mask: bool.

    Returns:
        One dimension, source's dtype.
    """
    mask, source = (t if t.is_contiguous() else t.contiguous() for t in (mask, source))
    ends, total = _ends(mask)
    out = allocator(source.get_device())((total,), (1,), source.dtype)
    return _place(mask, ends, source, out, (mask.numel(),))


def distinct(ordered: Tensor, *, places: bool) -> tuple[Tensor, Tensor | None]:
    """Return the elements that differ from the one before them, and on request where they are.

    Args:
        ordered: One dimension, dense, not empty; dtypes as for ``nonzero``.
        places: Return these too.

    Returns:
        Values, and int64 places or None.
    """
    shape = tuple(ordered.shape)
    ends, total = _ends(ordered, True)
    values = _place(ordered, ends, ordered, ordered.new_empty(total), shape, True)
    if not places:
        return values, None
    at = torch.empty(total, dtype=torch.int64, device=ordered.device)
    return values, _place(ordered, ends, None, at, shape, True)


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
