"""Rows sorted with their indices, stable; and the first few of a sorted row.

Up to 2048 elements are sorted in shared memory, longer rows by radix. The best of a long row come in rounds: those of
each part of it (up to 64 are selected without a sort), then those of what is left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import TOKEN, power_of_two
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Dense, Meta
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

PLACES = 2048  # of a block that sorts in shared memory
_THREADS, _RADIX_SLICE, _DIGITS = 256, 2048, 256
_TYPES = [(t,) for t in ("bf16", "fp16", "fp32", "i64", "i32", "u8")]
_KEY_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "i32": 32, "i64": 64, "u8": 8}
_ROWS = Kernel(
    "sort/sort_rows.cu", "sort_rows", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args="x:ptr list:ptr out:ptr indices:ptr rows:i64 n:i64 parts:i64 count:i64 length:i64 kept:i64 descending:i64",
)  # fmt: skip
_COUNT = Kernel(
    "sort/radix.cu", "radix_count", template="T", variants=_TYPES, max_registers=48, tier="aten",
    args="x:ptr keys:ptr counts:ptr n:i64 slices:i64 shift:i64 descending:i64",
)  # fmt: skip
_PLACE = Kernel(
    "sort/radix.cu", "radix_place", template="T", variants=_TYPES, max_registers=96, tier="aten",
    args="x:ptr keys:ptr list:ptr ends:ptr keys_out:ptr list_out:ptr values_out:ptr indices:ptr n:i64 slices:i64 "
    "shift:i64 descending:i64",
)  # fmt: skip
_SELECT = Kernel(
    "sort/select.cu", "select_best", template="T", variants=_TYPES, max_registers=96, tier="aten",
    args="x:ptr indices:ptr n:i64 parts:i64 part_length:i64 k:i64 aligned:i64 descending:i64",
)  # fmt: skip
_SELECT_BETTER = 1536  # places for elements that are better than the bound (cuda_src/sort/select.cu)
_SELECT_LIMIT = 64  # k up to which parts are long enough


def _plan_short(
    x: Meta, list_: Meta | None, parts: int, kept: int, values: bool, descending: bool, device: int
) -> Steps:
    n = x.shape[1]
    count = -(-n // parts) if list_ is None else list_.shape[1]
    rows, length = x.shape[0] * parts, max(2, power_of_two(count))
    grid = -(-rows // (PLACES // length))
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    launch = _ROWS.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    given = "list" if list_ is not None else 0
    step = Step(
        launch, "x", given, "out" if values else 0, "indices", rows, n, parts, count, length, kept, int(descending)
    )
    return Steps(step)


def _short_outputs(x: Meta, list_: Meta | None, parts: int, kept: int, values: bool, descending: bool) -> tuple:
    return Memory((x.shape[0], parts * kept), x.dtype) if values else None, Memory(
        (x.shape[0], parts * kept), torch.int64
    )


_SHORT = Primitive(
    "sort_rows", (Dense("x", None), Dense("list", None, optional=True)), "parts, kept, values, descending",
    results="out indices", outputs=_short_outputs, plan=_plan_short,
)  # fmt: skip


def _plan_count(x: Meta, keys: Meta | None, shift: int, descending: bool, device: int) -> Steps:
    rows, n = x.shape
    slices = -(-n // _RADIX_SLICE)
    launch = _COUNT.bind((TOKEN[x.dtype],), device, rows * slices, _THREADS)
    return Steps(Step(launch, "x", "keys" if keys else 0, "counts", n, slices, shift, int(descending)))


def _plan_place(
    x: Meta, keys: Meta | None, list_: Meta | None, ends: Meta, shift: int, last: bool, descending: bool, device: int
) -> Steps:
    rows, n = x.shape
    slices = -(-n // _RADIX_SLICE)
    launch = _PLACE.bind((TOKEN[x.dtype],), device, rows * slices, _THREADS)
    given = "keys" if keys else 0, "list" if list_ else 0
    made = (0, 0, "first", "second") if last else ("first", "second", 0, 0)
    return Steps(Step(launch, "x", *given, "ends", *made, n, slices, shift, int(descending)))


def _place_outputs(
    x: Meta, keys: Meta | None, list_: Meta | None, ends: Meta, shift: int, last: bool, _: bool
) -> tuple:
    if last:
        return Memory(x.shape, x.dtype), Memory(x.shape, torch.int64)
    key = torch.int64 if x.dtype == torch.int64 else torch.int32
    return Memory(x.shape, key), Memory(x.shape, torch.int32)


_COUNTS = Primitive(
    "radix_count", (Dense("x", None), Dense("keys", None, optional=True)), "shift, descending", results="counts",
    outputs=lambda x, *_: (Memory((x.shape[0], _DIGITS * -(-x.shape[1] // _RADIX_SLICE)), torch.int64),),
    plan=_plan_count,
)  # fmt: skip
_PLACES = Primitive(
    "radix_place",
    (Dense("x", None), Dense("keys", None, optional=True), Dense("list", None, optional=True), Dense("ends", None)),
    "shift, last, descending", results="first second", outputs=_place_outputs, plan=_plan_place,
)  # fmt: skip


Scan = Callable[[Tensor], Tensor]


def torch_scan(counts: Tensor) -> Tensor:
    """Return running sums of rows."""
    return counts.cumsum(1)


def sort_rows(x: Tensor, descending: bool, scan: Scan = torch_scan) -> tuple[Tensor, Tensor]:
    """Sort each row, stable; NaN is the largest.

    Args:
        x: (rows, n), not empty, n below 2^31; bfloat16, float16, float32, int64, int32, uint8 or bool.
        descending: The largest first; equal elements keep their order all the same.
        scan: Running sums of rows of int64.

    Returns:
        Values and int64 indices, dense, of x's shape.
    """
    x = x.contiguous()
    if x.shape[1] <= PLACES:
        return _SHORT(x, None, 1, x.shape[1], True, descending)
    keys = indices = None
    bits = _KEY_BITS[TOKEN[x.dtype]]
    for shift in range(0, bits, 8):
        ends = scan(_COUNTS(x, keys, shift, descending))
        keys, indices = _PLACES(x, keys, indices, ends, shift, shift + 8 == bits, descending)
    return keys, indices


def best_of_rows(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest (or smallest) elements of each row, best first, of equal ones the first; NaN is the largest.

    Args:
        x: As for ``sort_rows``.
        k: 1 to 256, and at most n.
        largest: Else smallest.

    Returns:
        Values and int64 indices, (rows, k), dense.
    """
    x = x.contiguous()
    rows, n = x.shape
    found, count = None, n
    while count > PLACES:
        if found is None and k <= _SELECT_LIMIT:
            found = _SELECTED(x, k, largest)
        elif found is None:
            parts = -(-n // PLACES)
            _, found = _SHORT(x, None, parts, k, False, largest)
        else:  # lists of several parts are rows of x's rows: x is not read by rows but by index
            parts = -(-count // PLACES)
            padding = found.new_full((rows, parts * PLACES - count), -1)
            lists = torch.cat((found, padding), 1)
            _, found = _LISTED(x, lists, parts, k, largest)
        count = found.shape[1]
    return _SHORT(x, found, 1, k, True, largest)


def _parts(x: Meta, k: int, device: int) -> tuple[int, int]:
    """Return how many parts a row is selected in, and their length: whole vectors for all threads.

    At most k - 1 threads have elements that are better than the bound, each a 256th of the part.
    """
    rows, n = x.shape
    unit = 16 * _THREADS
    longest = _SELECT_BETTER // max(k - 1, 1) * _THREADS // unit * unit
    parts = max(-(-n // longest), min(2 * device_info(device).sm_count // rows, n // (4 * unit), PLACES // k), 1)
    length = -(-n // (parts * unit)) * unit
    return -(-n // length), length


def _plan_select(x: Meta, k: int, descending: bool, device: int) -> Steps:
    parts, length = _parts(x, k, device)
    vector = 16 // x.dtype.itemsize
    aligned = x.misaligned == 0 and x.shape[1] % vector == 0
    if x.shape[0] * parts > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    launch = _SELECT.bind((TOKEN[x.dtype],), device, x.shape[0] * parts, _THREADS)
    return Steps(Step(launch, "x", "indices", x.shape[1], parts, length, k, int(aligned), int(descending)))


_SELECTED = Primitive(
    "select_best", (Dense("x", None),), "k, descending", results="indices", plan=_plan_select,
    outputs=lambda x, k, _: (Memory((x.shape[0], _parts(x, k, x.device)[0] * k), torch.int64),),
)  # fmt: skip


def _plan_listed(x: Meta, list_: Meta, parts: int, kept: int, descending: bool, device: int) -> Steps:
    rows = x.shape[0] * parts
    launch = _ROWS.bind((TOKEN[x.dtype],), device, rows, _THREADS)
    numbers = rows, x.shape[1], parts, PLACES, PLACES, kept, int(descending)
    return Steps(Step(launch, "x", "list", 0, "indices", *numbers))


_LISTED = Primitive(
    "sort_listed", (Dense("x", None), Dense("list", None)), "parts, kept, descending", results="out indices",
    outputs=lambda x, list_, parts, kept, _: (None, Memory((x.shape[0], parts * kept), torch.int64)),
    plan=_plan_listed,
)  # fmt: skip

OP = Op("sorting", public=(), kernels=(_ROWS, _COUNT, _PLACE, _SELECT), torch_ops=())
__all__ = ["OP", "best_of_rows", "sort_rows"]
