"""Elements, or stretches of them, written to places that indices name: what scatter and index_put share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import Dims, merged, padded, product
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.declared import Argument, InPlace, Meta, Primitive
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

MAX_INDICES = 2
_THREADS = 256
_EACH = 4  # units of a thread
_SCATTER = Kernel(
    "index/scatter.cu", "scatter_units", struct=True, template="BYTES", max_registers=56, tier="aten",
    variants=[(b,) for b in (1, 2, 4, 8, 16)],
    args="out:ptr source:ptr first_index:ptr second_index:ptr value:i64 units:i64 from_end:i64 first_n:i64 "
    "first_stride:i64 first_int64:i64 second_n:i64 second_stride:i64 second_int64:i64 size1:i64 size2:i64 size3:i64 "
    "divider1:i64 divider2:i64 divider3:i64 out0:i64 out1:i64 out2:i64 out3:i64 source0:i64 source1:i64 source2:i64 "
    "source3:i64 first0:i64 first1:i64 first2:i64 first3:i64 second0:i64 second1:i64 second2:i64 second3:i64",
)  # fmt: skip


def _walk(out: tuple, dim: int, count: int, shape: tuple, *strides: tuple | None) -> Dims | None:
    """Return four dimensions (size, stride in out, in the source, in each index), or None if there are more.

    Args:
        out: Strides of the result, of which `count` from `dim` on are indexed.
        dim: As above.
        count: As above.
        shape: Of the source: the indices' dimensions in the place of the indexed ones.
        strides: Of the source and of the indices; None for absent ones.
    """
    indexed = len(shape) - (len(out) - count)
    of_out = (*out[:dim], *[0] * indexed, *out[dim + count :])
    others = [(0,) * len(shape) if stride is None else stride for stride in strides]
    dims = [d for d in zip(shape, of_out, *others, strict=True) if d[0] > 1]
    return padded(merged(dims), 4, 2 + MAX_INDICES)


def _plan(
    out: Meta, source: Meta | None, first: Meta, second: Meta | None, dim: int, from_end: bool, device: int
) -> Steps:  # fmt: skip
    size, indices = out.dtype.itemsize, [index for index in (first, second) if index is not None]
    strides = [None if meta is None else meta.stride for meta in (source, first, second)]
    walk = _walk(out.stride, dim, len(indices), first.shape, *strides)
    unit, inner = size, walk[3]
    named = [
        (out.shape[dim + i], out.stride[dim + i] * size, int(index.dtype == torch.int64))
        for i, index in enumerate(indices)
    ]
    if source is not None and inner[1:] == (1, 1, 0, 0):  # neighbours that share their indices
        unit = 16
        others = [step * size for outer in walk[:3] for step in outer[1:3]] + [step for _, step, _ in named]
        others += [inner[0] * size, out.misaligned, source.misaligned]
        while unit > size and any(value % unit for value in others):
            unit //= 2
    sizes = [*(outer[0] for outer in walk[:3]), inner[0] * size // unit]
    units = product(sizes)
    dividers = [divisor(n) for n in sizes[1:]] if units < 2**31 else [0, 0, 0]
    moved = [step for i in (1, 2) for step in (*(outer[i] * size for outer in walk[:3]), inner[i] * unit)]
    launch = _SCATTER.bind((unit,), device, -(-units // (_THREADS * _EACH)), _THREADS)
    tensors = "out", 0 if source is None else "source", "first", 0 if second is None else "second"
    numbers = "value" if source is None else 0, units, int(from_end), *named[0], *(named[1:] or [(0, 0, 0)])[0]
    chosen = [dims[i] for i in (3, 4) for dims in walk]
    return Steps(Step(launch, *tensors, *numbers, *sizes[1:], *dividers, *moved, *chosen))


_WRITE = Primitive(
    "scatter",
    (InPlace("out", None), Argument("source", None, optional=True), Argument("first", None),
     Argument("second", None, optional=True)),
    "dim, from_end, value", results="", numbers="value", plan=_plan,
)  # fmt: skip


def scatterable(out: Tensor, source: Tensor | None, indices: Sequence[Tensor], dim: int) -> bool:
    """Return False for strides that leave more than four dimensions."""
    strides = [None if tensor is None else tensor.stride() for tensor in (source, *indices)]
    strides += [None] * (MAX_INDICES - len(indices))
    return _walk(out.stride(), dim, len(indices), indices[0].shape, *strides) is not None


def scatter(
    out: Tensor, source: Tensor | None, indices: Sequence[Tensor], dim: int, *, from_end: bool = False, value: int = 0
) -> None:
    """Write elements to places of `out` that indices name along `dim`, and along the next dimension.

    Where several elements have one place, one of them stays: which one is not defined.

    Args:
        out: Elements of 1, 2, 4 or 8 bytes; no two of them share memory; strides that ``scatterable`` accepts.
        source: Of out's dtype, any strides; shares no memory with it. None: `value` is written.
        indices: One or two, int32 or int64, of the source's shape (expanded): out's, with any number of dimensions in
            the place of the indexed ones, and others nowhere larger.
        dim: At least 0.
        from_end: Negative indices count from the end.
        value: The bits of an element.
    """
    _WRITE(out, source, indices[0], indices[1] if len(indices) > 1 else None, dim, from_end, value)


OP = Op("scattering", public=(), kernels=(_SCATTER,), torch_ops=())
__all__ = ["MAX_INDICES", "OP", "scatter", "scatterable"]
