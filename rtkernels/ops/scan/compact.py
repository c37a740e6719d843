"""Elements that are not 0, in order: their coordinates, or elements of another tensor; and indices repeated by counts.

The number of results is read by the host, one time in a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import TOKEN
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Dense, Meta
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS, _SLICE = 256, 4096
_TYPES = [(t,) for t in ("bf16", "fp16", "fp32", "i64", "i32", "u8")]
_COUNT = Kernel(
    "scan/compact.cu", "compact_count", template="T", args="x:ptr counts:ptr n:i64", variants=_TYPES, max_registers=40,
    tier="aten",
)  # fmt: skip
_PLACE = Kernel(
    "scan/compact.cu", "compact_place", template="T", variants=_TYPES, max_registers=72, tier="aten",
    args="x:ptr ends:ptr source:ptr out:ptr n:i64 item_bytes:i64 rank:i64 size0:i64 size1:i64 size2:i64 size3:i64 "
    "out_row:i64 out_col:i64",
)  # fmt: skip
_REPEAT = Kernel(
    "scan/compact.cu", "repeat_place", template="I", args="ends:ptr out:ptr count:i64 total:i64",
    variants=[("i32",), ("i64",)], max_registers=40, tier="aten",
)  # fmt: skip


def _plan_count(x: Meta, device: int) -> Steps:
    slices = -(-x.numel() // _SLICE)
    return Steps(Step(_COUNT.bind((TOKEN[x.dtype],), device, slices, _THREADS), "x", "counts", x.numel()))


def _plan_coordinates(x: Meta, ends: Meta, total: int, device: int) -> Steps:
    launch = _PLACE.bind((TOKEN[x.dtype],), device, -(-x.numel() // _SLICE), _THREADS)
    rank = len(x.shape)
    sizes = (*x.shape, *[1] * (4 - rank))
    return Steps(Step(launch, "x", "ends", 0, "out", x.numel(), 0, rank, *sizes, 1, total))


def _plan_elements(x: Meta, ends: Meta, source: Meta, total: int, device: int) -> Steps:
    launch = _PLACE.bind((TOKEN[x.dtype],), device, -(-x.numel() // _SLICE), _THREADS)
    return Steps(Step(launch, "x", "ends", "source", "out", x.numel(), source.dtype.itemsize, *[1] * 5, 0, 0))


def _plan_repeat(ends: Meta, dtype: torch.dtype, total: int, device: int) -> Steps:
    launch = _REPEAT.bind((TOKEN[dtype],), device, -(-total // _THREADS), _THREADS)
    return Steps(Step(launch, "ends", "out", ends.shape[0], total))


_COUNTS = Primitive(
    "compact_count", (Dense("x", None),), results="counts",
    outputs=lambda x: (Memory((-(-x.numel() // _SLICE),), torch.int64),), plan=_plan_count,
)  # fmt: skip
_COORDINATES = Primitive(
    "compact_coordinates", (Dense("x", None), Dense("ends", None)), "total", results="out",
    outputs=lambda x, ends, total: (Memory((total, len(x.shape)), torch.int64, (1, max(total, 1))),),
    plan=_plan_coordinates,
)  # fmt: skip
_ELEMENTS = Primitive(
    "compact_elements", (Dense("x", None), Dense("ends", None), Dense("source", None)), "total", results="out",
    outputs=lambda x, ends, source, total: (Memory((total,), source.dtype),), plan=_plan_elements,
)  # fmt: skip
_REPEATED = Primitive(
    "repeated", (Dense("ends", None),), "dtype, total", results="out",
    outputs=lambda ends, dtype, total: (Memory((total,), dtype),), plan=_plan_repeat,
)  # fmt: skip


def _ends(x: Tensor) -> tuple[Tensor, int]:
    ends = _COUNTS(x).cumsum(0)
    return ends, int(ends[-1])


def nonzero(x: Tensor) -> Tensor:
    """Return the coordinates of elements that are not 0, in row-major order.

    Args:
        x: bfloat16, float16, float32, int64, int32, uint8 or bool; one to four dimensions, not empty.

    Returns:
        (count, dimensions), int64; its columns lie side by side, as torch's do.
    """
    x = x.contiguous()
    return _COORDINATES(x, *_ends(x))


def chosen(source: Tensor, mask: Tensor) -> Tensor:
    """Return the elements of `source` whose mask is set, in row-major order; both have one shape, and are not empty.

    Args:
        source: Elements of 1, 2, 4 or 8 bytes.
        mask: bool.

    Returns:
        One dimension, source's dtype.
    """
    mask = mask.contiguous()
    ends, total = _ends(mask)
    return _ELEMENTS(mask, ends, source.contiguous(), total)


def repeated(repeats: Tensor, total: int | None) -> Tensor:
    """Return each index i of `repeats` as often as repeats[i] says.

    Args:
        repeats: int32 or int64, one dimension, none below 0, not empty.
        total: Their sum, if it is known.

    Returns:
        One dimension, repeats' dtype.
    """
    ends = repeats.cumsum(0)
    return _REPEATED(ends, repeats.dtype, int(ends[-1]) if total is None else total)


OP = Op("compact", public=(), kernels=(_COUNT, _PLACE, _REPEAT), torch_ops=())
__all__ = ["OP", "chosen", "nonzero", "repeated"]
