"""Elements, or stretches of them, chosen along one dimension by an index: what gather and index_select share."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import merged, padded, product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import divisor, group_threads, is_dense, vector_bytes
from rtkernels.runtime.operator.declared import Argument, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_EACH = 4  # elements of a thread
_GATHER = Kernel(
    "index/gather.cu", "gather_units", template="BYTES", variants=[(b,) for b in (1, 2, 4, 8, 16)], max_registers=72,
    tier="aten",
    args="x:ptr index:ptr out:ptr units:i64 n:i64 x_dim:i64 index_int64:i64 from_end:i64 size1:i64 size2:i64 size3:i64 "
    "divider1:i64 divider2:i64 divider3:i64 x0:i64 x1:i64 x2:i64 x3:i64 index0:i64 index1:i64 index2:i64 index3:i64",
)  # fmt: skip
_ROWS = Kernel(
    "index/gather.cu", "select_rows", template="BYTES", variants=[(16,)], max_registers=48, tier="aten",
    args="x:ptr index:ptr out:ptr outer_rows:i64 count:i64 count_divisor:i64 units:i64 n:i64 x_outer:i64 x_dim:i64 "
    "index_stride:i64 index_int64:i64 from_end:i64 threads_per_row:i64",
)  # fmt: skip
_STAGED = Kernel(
    "index/gather.cu", "gather_staged", template="BYTES", variants=[(b,) for b in (1, 2, 4, 8)], max_registers=64,
    tier="aten",
    args="x:ptr index:ptr out:ptr rows:i64 rows_per_block:i64 columns:i64 per_row:i64 row_divisor:i64 "
    "vector_divisor:i64 x_row:i64",
)  # fmt: skip
_STAGED_BYTES = 32768  # of short rows in a block
_LONG_BYTES = 65536  # of a row, whose block has an SM of its own and 1024 threads instead of 512
_MAX_STAGED = 160 * 1024  # of one row
_FEW_ROWS_INDICES = 2048


def _walk(x: Meta | Tensor, index: tuple, dim: int, x_stride: tuple, out: tuple) -> list[tuple[int, ...]] | None:
    """Return four dimensions (size, stride in x, in the index, in the result), or None if there are more."""
    steps = [0 if i == dim else step for i, step in enumerate(x_stride)]
    dims = [d for d in zip(out, steps, index, dense_strides(out), strict=True) if d[0] > 1]
    return padded(merged(dims), 4, 3)


def _index_strides(index: Meta, dim: int, rank: int, select: bool) -> tuple[int, ...]:
    return tuple(index.stride[0] if i == dim else 0 for i in range(rank)) if select else tuple(index.stride)


def _shape(x: Meta, index: Meta, dim: int, select: bool) -> tuple[int, ...]:
    return (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]) if select else tuple(index.shape)


def _select_step(x: Meta, index: Meta, dim: int, from_end: bool, device: int) -> Step | None:
    """Return the launch that moves rows of whole vectors; None if these are none."""
    size, inner, outer = x.dtype.itemsize, product(x.shape[dim + 1 :]), product(x.shape[:dim])
    steps = merged([(n, step) for n, step in zip(x.shape[:dim], x.stride[:dim], strict=True) if n > 1])
    inside = merged([(n, step) for n, step in zip(x.shape[dim + 1 :], x.stride[dim + 1 :], strict=True) if n > 1])
    if len(steps) > 1 or len(inside) != 1 or inside[0][1] != 1 or outer * index.numel() >= 2**31:
        return None
    x_outer, x_dim = (steps[0][1] if steps else 0) * size, x.stride[dim] * size
    if vector_bytes(x.misaligned, inner * size, x_outer, x_dim) != 16:
        return None
    units, count = inner * size // 16, index.numel()
    if units < _EACH:
        return None
    threads = group_threads(-(-units // _EACH), _THREADS)
    slices, groups = -(-units // (threads * _EACH)), _THREADS // threads
    if slices >= 2**16:
        return None
    launch = _ROWS.bind((16,), device, (-(-outer * count // groups), slices), _THREADS)
    sizes = outer * count, count, divisor(count), units, x.shape[dim], x_outer, x_dim
    return Step(
        launch, "x", "index", "out", *sizes, index.stride[0], int(index.dtype == torch.int64), int(from_end), threads
    )


def _staged_step(x: Meta, index: Meta, dim: int, device: int) -> Step | None:
    """Return the launch that reads whole rows of x; None where few elements of them are wanted, or they are long."""
    size, columns, per_row = x.dtype.itemsize, x.shape[-1], index.shape[-1]
    if dim != len(x.shape) - 1 or x.shape[:-1] != index.shape[:-1] or x.row_stride is None:
        return None
    if index.dtype != torch.int64 or not is_dense(index):
        return None
    step, row_bytes = x.row_stride * size, columns * size
    limit = min(_MAX_STAGED, device_info(device).shared_per_block)
    if per_row % 4 or index.misaligned or row_bytes > limit or per_row * 16 < row_bytes:
        return None
    if x.rows < device_info(device).sm_count and per_row > _FEW_ROWS_INDICES:
        return None  # a block for each row would leave SMs idle
    if vector_bytes(x.misaligned, row_bytes, step) != 16 or per_row >= 2**28:
        return None
    per_block = max(1, _STAGED_BYTES // row_bytes)
    per_block = min(per_block, max(1, x.rows // device_info(device).sm_count))
    threads = 512 if row_bytes <= _LONG_BYTES else 1024
    launch = _STAGED.bind((size,), device, -(-x.rows // per_block), threads, per_block * row_bytes)
    sizes = x.rows, per_block, columns, per_row, divisor(per_row // 4), divisor(row_bytes // 16), step
    return Step(launch, "x", "index", "out", *sizes)


def _plan(x: Meta, index: Meta, dim: int, select: bool, from_end: bool, device: int) -> Steps:
    step = _select_step(x, index, dim, from_end, device) if select else _staged_step(x, index, dim, device)
    if step is not None:
        return Steps(step)
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
    outputs=lambda x, index, dim, select: (Memory(_shape(x, index, dim, select), x.dtype),), plan=_plan,
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


OP = Op("gathering", public=(), kernels=(_GATHER, _ROWS, _STAGED), torch_ops=())
__all__ = ["OP", "gather", "gatherable"]
