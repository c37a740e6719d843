"""Tokens ordered by row in passes over digits of the row, for more of them than one kernel can sort."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.experts import layout_bytes, shared_for_overlap
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, build_together
from rtkernels.runtime.launch.memory import Allocate, dense_memory
from rtkernels.runtime.launch.plans import Plans

_THREADS, _WARPS = 512, 16
MOST_DIGIT_BITS = 9
LEAST_TOKENS, MANY_TOKENS = 512, 2**20  # a chunk should have at least; from which on processors have two chunks
_FILL_BYTES = _THREADS * 16 * 16  # zeros one block writes

_COUNT = Kernel(
    "index/embedding_order.cu",
    "order_count",
    template="THREADS",
    args="list:ptr table:ptr counters:ptr fill:ptr tokens:i64 per_chunk:i64 chunk_count:i64 digits:i64 width:i64 "
    "from_ids:i64 wide:i64 rows:i64 start:i64 padding:i64 shift:i64 counter_count:i64 fill_from:i64 fill_bytes:i64",
    variants=[(_THREADS,)],
    max_registers=56,
)
_PLACE = Kernel(
    "index/embedding_order.cu",
    "order_place",
    template="THREADS",
    args="list:ptr table:ptr sorted:ptr fill:ptr tokens:i64 per_chunk:i64 chunk_count:i64 digits:i64 width:i64 "
    "from_ids:i64 wide:i64 rows:i64 start:i64 padding:i64 shift:i64 warps:i64 fill_from:i64 fill_bytes:i64",
    variants=[(_THREADS,)],
    max_registers=64,
)
KERNELS = (_COUNT, _PLACE)


def _plan(tokens: int, rows: int, fill_bytes: int, device: int):
    """Return ``(launches with their shift and bytes to fill, sizes, allocators and layouts of table and list)``."""
    bits = max(1, (rows - 1).bit_length())
    passes = -(-bits // MOST_DIGIT_BITS)
    digit_bits = -(-bits // passes)
    digits = 1 << digit_bits
    columns = -(-digits // 4) * 4
    most = device_info(device).sm_count * (1 if tokens < MANY_TOKENS else 2)
    each = -(-tokens // min(-(-tokens // LEAST_TOKENS), most))
    chunks = -(-tokens // each)
    width = 1 if each < 2**8 else 2 if each < 2**16 else 4
    build_together(device, (_COUNT, (_THREADS,)), (_PLACE, (_THREADS,)))
    share = -(-fill_bytes // (2 * passes * 16)) * 16  # of the zeros, for each launch
    shared = layout_bytes(digits, chunks, _THREADS) + 2 * columns * (_WARPS + 1)
    steps = []
    for i in range(2 * passes):
        fill_from = min(i * share, fill_bytes)
        filled = min(share, fill_bytes - fill_from)
        grid = chunks + -(-filled // _FILL_BYTES)
        if i % 2 == 0:
            asked = shared_for_overlap(4 * columns, shared)
            launch = _COUNT.bind((_THREADS,), device, grid, _THREADS, asked, overlap=i > 0)
        else:
            launch = _PLACE.bind((_THREADS,), device, grid, _THREADS, shared, overlap=True)
        steps.append((launch, i // 2 * digit_bits, fill_from, filled))
    sizes = (tokens, each, chunks, digits, width)
    return (
        steps,
        sizes,
        dense_memory(device, (chunks * columns * width,), torch.uint8),
        dense_memory(device, (tokens,), torch.int64),
    )


ORDER_PLANS = Plans(_plan)


def ordered(ids: Tensor, counters: Tensor, fill: Tensor | None, rows: int, start: int, padding: int) -> Tensor:
    """Return the sorted list of (row, token) pairs of dense `ids`; writes zeros to the counters and to dense `fill`."""
    tokens = ids.numel()
    fill_bytes = 0 if fill is None else fill.numel() * fill.element_size()
    steps, sizes, (new_table, table_layout), new_list = ORDER_PLANS[tokens, rows, fill_bytes, ids.get_device()]
    table = new_table(*table_layout)
    wide, target = int(ids.dtype == torch.int64), 0 if fill is None else fill.data_ptr()
    source, lists = ids, _two_lists(*new_list, len(steps))
    for i in range(0, len(steps), 2):
        keys = (int(i == 0), wide, rows, start, padding)
        launch, shift, *fills = steps[i]
        number = counters.numel() if i == 0 else 0
        launch(source.data_ptr(), table.data_ptr(), counters.data_ptr(), target, *sizes, *keys, shift, number, *fills)
        launch, shift, *fills = steps[i + 1]
        result = lists[(i // 2) % 2]
        launch(source.data_ptr(), table.data_ptr(), result.data_ptr(), target, *sizes, *keys, shift, _WARPS, *fills)
        source = result
    return source


def _two_lists(allocate: Allocate, layout: tuple, steps: int) -> list[Tensor]:
    return [allocate(*layout) for _ in range(min(steps // 2, 2))]
