"""Rows sorted with their indices, stable; and the first few of a sorted row.

Short rows are sorted by a network, several in a block; rows of up to 4096 elements by radix in one block, longer ones
by radix passes over memory. The best of a long row come in rounds: those of each part of it (up to 64 are selected
without a sort), then those of what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import FLOATS, TOKEN, power_of_two
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Offset, Step, Steps
from rtkernels.runtime.operator.registry import Op

PLACES = 2048  # of a block that sorts in shared memory
LONGEST = 2**30 - 1  # elements of a row
_NETWORK = 128  # elements of a row, up to which a network sorts it
_BLOCK_ROWS = 4096  # up to which one block does
_ROUNDS = ((512, 4), (2048, 8), (_BLOCK_ROWS, 16))  # of 32 elements for each warp of such a block, by length
# As in cuda_src/sort/radix_tile.cuh.
_THREADS = 256
_DIGITS = 256
_CHUNK = 512  # elements of a warp
_SWEEP_WARPS = 8
_TYPES = [(t,) for t in ("bf16", "fp16", "fp32", "i64", "i32", "u8")]
_KEY_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "i32": 32, "i64": 64, "u8": 8}
_ROWS = Kernel(
    "sort/sort_rows.cu", "sort_rows", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args="x:ptr list:ptr out:ptr indices:ptr rows:i64 n:i64 parts:i64 count:i64 length:i64 kept:i64 descending:i64",
)  # fmt: skip
_BLOCK = Kernel(
    "sort/block_sort.cu", "block_sort", template="T", variants=_TYPES, max_registers=128, tier="aten",
    args="x:ptr values:ptr indices:ptr n:i64 rounds_:i64 descending:i64",
)  # fmt: skip
_HISTOGRAM = Kernel(
    "sort/radix.cu", "radix_histogram", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args="x:ptr counts:ptr zeros:ptr n:i64 slices:i64 length:i64 descending:i64",
)  # fmt: skip
_BEGINS = Kernel(
    "sort/radix.cu", "radix_begins", template="PASSES", variants=[(1,), (2,), (4,), (8,)], max_registers=40,
    args="counts:ptr skips:ptr n:i64", tier="aten",
)  # fmt: skip
_SWEEP = Kernel(
    "sort/radix.cu", "radix_sweep", template="T", variants=_TYPES, max_registers=128, tier="aten",
    args="x:ptr keys_a:ptr list_a:ptr keys_b:ptr list_b:ptr values:ptr indices:ptr begins:ptr skips:ptr words:ptr "
    "next_words:ptr ticket:ptr zeros:ptr n:i64 tiles:i64 pass:i64 descending:i64",
)  # fmt: skip
_SELECT = Kernel(
    "sort/select.cu", "select_best", template="T", variants=_TYPES, max_registers=96, tier="aten",
    args="x:ptr indices:ptr n:i64 parts:i64 part_length:i64 k:i64 aligned:i64 descending:i64",
)  # fmt: skip
_SELECT_BETTER = 1536  # places for elements that are better than the bound (cuda_src/sort/select.cu)
_SELECT_LIMIT = 64  # k up to which parts are long enough


def _plan_short(
    x: Meta, listed: Meta | None, parts: int, kept: int, values: bool, descending: bool, device: int
) -> Steps:
    n = x.shape[1]
    count = -(-n // parts) if listed is None else listed.shape[1]
    rows, length = x.shape[0] * parts, max(2, power_of_two(count))
    grid = -(-rows // (PLACES // length))
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    launch = _ROWS.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    given = "listed" if listed is not None else 0
    step = Step(
        launch, "x", given, "out" if values else 0, "indices", rows, n, parts, count, length, kept, int(descending)
    )
    return Steps(step)


def _short_outputs(x: Meta, parts: int, kept: int, values: bool) -> tuple:
    return Memory((x.shape[0], parts * kept), x.dtype) if values else None, Memory(
        (x.shape[0], parts * kept), torch.int64
    )


_SHORT = Primitive(
    "sort_rows", (Dense("x", None), Dense("listed", None, optional=True)), "parts, kept, values, descending",
    results="out indices", outputs=_short_outputs, plan=_plan_short,
)  # fmt: skip


def _sorted_outputs(x: Meta, ordered: bool) -> tuple:
    return Memory(x.shape, x.dtype), Memory(x.shape, torch.int64) if ordered else None


def _plan_block(x: Meta, ordered: bool, descending: bool, device: int) -> Steps:
    rows, n = x.shape
    if rows > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    rounds, token = next(r for limit, r in _ROUNDS if n <= limit), TOKEN[x.dtype]
    warps = -(-n // (32 * rounds))
    key = 8 if token == "i64" else 4
    index = 2 if _KEY_BITS[token] > 16 else 0
    launch = _BLOCK.bind((token,), device, rows, 32 * warps, warps * (32 * rounds * (key + index) + 4 * _DIGITS))
    return Steps(Step(launch, "x", "values", "indices" if ordered else 0, n, rounds, int(descending)))


_BLOCK_SORT = Primitive(
    "block_sort", (Dense("x", None),), "ordered, descending", results="values indices", outputs=_sorted_outputs,
    plan=_plan_block,
)  # fmt: skip


def _plan_radix(x: Meta, ordered: bool, descending: bool, device: int) -> Steps:
    """Plan the passes. Look-back's words of the first pass are cleared with the rest, those of others by the passes."""
    (rows, n), token = x.shape, TOKEN[x.dtype]
    tiles, passes = -(-n // (_CHUNK * _SWEEP_WARPS)), _KEY_BITS[token] // 8
    length = _CHUNK * max(16, min(256, rows * n // (_CHUNK * 2048)))
    slices = -(-n // length)
    if rows * max(tiles, slices) > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    words, counts = rows * tiles * _DIGITS, rows * passes * _DIGITS
    key = 8 if token == "i64" else 4
    shared = _SWEEP_WARPS * (_CHUNK * (key + 4 * ordered) + 4 * _DIGITS)
    sweep = _SWEEP.bind((token,), device, rows * tiles, 32 * _SWEEP_WARPS, shared)
    zeros = Offset("cleared", 4 * (counts + words + passes)) if x.dtype in FLOATS and not ordered else 0
    scratch = {
        "cleared": Memory((counts + words + passes + rows,), torch.int32, zero=True),
        "others": Memory((words,), torch.int32),
        "skips": Memory((rows,), torch.int32),
    }
    between = [0, 0, 0, 0]
    if passes > 1:
        scratch |= {name: Memory((rows * n,), x.dtype) for name in ("keys_a", "keys_b")}
        between[::2] = "keys_a", "keys_b"
        if ordered:
            scratch |= {name: Memory((rows * n,), torch.int32) for name in ("list_a", "list_b")}
            between[1::2] = "list_a", "list_b"
    first, second = Offset("cleared", 4 * counts), "others"
    steps = [
        Step(
            _HISTOGRAM.bind((token,), device, rows * slices, _THREADS),
            "x", "cleared", zeros, n, slices, length, int(descending),
        ),
        Step(_BEGINS.bind((passes,), device, rows, _DIGITS), "cleared", "skips", n),
    ]  # fmt: skip
    for i in range(passes):
        numbers = n, tiles, i, int(descending)
        results = "values", "indices" if ordered else 0
        ticket = Offset("cleared", 4 * (counts + words + i))
        steps.append(Step(sweep, "x", *between, *results, "cleared", "skips", first, second, ticket, zeros, *numbers))
        first, second = second, first
    return Steps(*steps, scratch=scratch)


_RADIX_SORT = Primitive(
    "radix_sort", (Dense("x", None),), "ordered, descending", results="values indices", outputs=_sorted_outputs,
    plan=_plan_radix,
)  # fmt: skip


def sort_rows(x: Tensor, descending: bool, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """Sort each row, stable; NaN is the largest.

    Args:
        x: (rows, n), not empty, n up to ``LONGEST``; bfloat16, float16, float32, int64, int32, uint8 or bool.
        descending: The largest first; equal elements keep their order all the same.
        ordered: Return indices too. Else all zeros of a long row have the sign of its first one, and NaNs lose their
            bits.

    Returns:
        Values and int64 indices, dense, of x's shape.
    """
    x = x.contiguous()
    if x.shape[1] <= _NETWORK:
        return _SHORT(x, None, 1, x.shape[1], True, descending)
    sort = _BLOCK_SORT if x.shape[1] <= _BLOCK_ROWS else _RADIX_SORT
    return sort(x, ordered, descending)


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
    outputs=lambda x, k: (Memory((x.shape[0], _parts(x, k, x.device)[0] * k), torch.int64),),
)  # fmt: skip


def _plan_listed(x: Meta, parts: int, kept: int, descending: bool, device: int) -> Steps:
    rows = x.shape[0] * parts
    launch = _ROWS.bind((TOKEN[x.dtype],), device, rows, _THREADS)
    numbers = rows, x.shape[1], parts, PLACES, PLACES, kept, int(descending)
    return Steps(Step(launch, "x", "listed", 0, "indices", *numbers))


_LISTED = Primitive(
    "sort_listed", (Dense("x", None), Dense("listed", None)), "parts, kept, descending", results="out indices",
    outputs=lambda x, parts, kept: (None, Memory((x.shape[0], parts * kept), torch.int64)),
    plan=_plan_listed,
)  # fmt: skip

OP = Op("sorting", public=(), kernels=(_ROWS, _BLOCK, _HISTOGRAM, _BEGINS, _SWEEP, _SELECT), torch_ops=())
__all__ = ["OP", "best_of_rows", "sort_rows"]
