"""Elements, or stretches of them, chosen along one dimension by an index: what gather and index_select share."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import merged, padded, product
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.declared import Argument, Meta
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS, _EACH = 256, 4  # elements of a thread
_GATHER = Kernel(
    "index/gather.cu", "gather_units", template="BYTES", variants=[(b,) for b in (1, 2, 4, 8, 16)], max_registers=72,
    tier="aten",
    args="x:ptr index:ptr out:ptr units:i64 n:i64 x_dim:i64 index_int64:i64 from_end:i64 size1:i64 size2:i64 size3:i64 "
    "divider1:i64 divider2:i64 divider3:i64 x0:i64 x1:i64 x2:i64 x3:i64 index0:i64 index1:i64 index2:i64 index3:i64",
)  # fmt: skip


def _walk(x: Meta | Tensor, index: tuple, dim: int, x_stride: tuple, out: tuple) -> list[tuple[int, ...]] | None:
    """Return four dimensions (size, stride in x, in the index, in the result), or None if there are more."""
    steps = [0 if i == dim else step for i, step in enumerate(x_stride)]
    dims = [d for d in zip(out, steps, index, dense_strides(out), strict=True) if d[0] > 1]
    return padded(merged(dims), 4, 3)


def _index_strides(index: Meta, dim: int, rank: int, select: bool) -> tuple[int, ...]:
    return tuple(index.stride[0] if i == dim else 0 for i in range(rank)) if select else tuple(index.stride)


def _shape(x: Meta, index: Meta, dim: int, select: bool) -> tuple[int, ...]:
    return (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]) if select else tuple(index.shape)


def _plan(x: Meta, index: Meta, dim: int, select: bool, from_end: bool, device: int) -> Steps:
    shape, size = _shape(x, index, dim, select), x.dtype.itemsize
    walk = _walk(x, _index_strides(index, dim, len(shape), select), dim, x.stride, shape)
    unit, inner = size, walk[3]
    if inner[1] == 1 and inner[2] == 0:  # neighbours that share an index
        unit = 16
        others = [step * size for _, step, *_ in walk[:3]] + [x.stride[dim] * size, inner[0] * size, x.misaligned]
        while unit > size and any(value % unit for value in others):
            unit //= 2
    per_unit = unit // size
    sizes = [*(n for n, *_ in walk[:3]), inner[0] // per_unit]
    strides = [*(step * size for _, step, *_ in walk[:3]), inner[1] * size * per_unit]
    units = product(sizes)
    dividers = [divisor(n) for n in sizes[1:]] if units < 2**31 else [0, 0, 0]
    launch = _GATHER.bind((unit,), device, -(-units // (_THREADS * _EACH)), _THREADS)
    numbers = units, x.shape[dim], x.stride[dim] * size, int(index.dtype == torch.int64), int(from_end)
    return Steps(
        Step(launch, "x", "index", "out", *numbers, *sizes[1:], *dividers, *strides, *(step for *_, step, _ in walk))
    )


_CHOOSE = Primitive(
    "gather", (Argument("x", None), Argument("index", None)), "dim, select, from_end", results="out",
    outputs=lambda x, index, dim, select, _: (Memory(_shape(x, index, dim, select), x.dtype),), plan=_plan,
)  # fmt: skip


def gatherable(x: Tensor, index: Tensor, dim: int, select: bool) -> bool:
    """Return False for strides that leave more than four dimensions."""
    shape, strides = _shape(x, index, dim, select), index.stride()
    if select:
        strides = tuple(strides[0] if i == dim else 0 for i in range(len(shape)))
    return _walk(x, strides, dim, x.stride(), shape) is not None


def gather(x: Tensor, index: Tensor, dim: int, *, select: bool = False, from_end: bool = False) -> Tensor:
    """Return the elements of x that an index names along `dim`.

    Args:
        x: Elements of 1, 2, 4 or 8 bytes; any strides that ``gatherable`` accepts.
        index: int32 or int64, of x's rank and nowhere larger but along `dim`; with `select` of one dimension.
        dim: At least 0.
        select: The index is the same for all other coordinates.
        from_end: Negative indices count from the end.

    Returns:
        Dense, of the index's shape; with `select` of x's, with the index's size along `dim`.
    """
    return _CHOOSE(x, index, dim, select, from_end)


OP = Op("gathering", public=(), kernels=(_GATHER,), torch_ops=())
__all__ = ["OP", "gather", "gatherable"]
