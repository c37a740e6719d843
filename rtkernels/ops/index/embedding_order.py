"""Tokens ordered by row in passes over digits of the row, for more of them than one kernel can sort."""

from __future__ import annotations

import torch

from rtkernels.ops.shared.experts import layout_bytes, shared_for_overlap
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, build_together
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Step

_THREADS = 512
_WARPS = 16
MAX_DIGIT_BITS = 9
MIN_TOKENS = 512  # of a chunk
MANY_TOKENS = 2**20  # from here on, SMs have two chunks each
_FILL_BYTES = _THREADS * 16 * 16  # zeros one block writes

_COUNT = Kernel(
    "index/embedding_order.cu", "order_count", template="THREADS", max_registers=56,
    args="list:ptr table:ptr counters:ptr fill:ptr tokens:i64 per_chunk:i64 chunk_count:i64 digits:i64 width:i64 "
    "from_ids:i64 ids_int64:i64 rows:i64 start:i64 padding:i64 shift:i64 counter_count:i64 fill_from:i64 "
    "fill_bytes:i64",
    variants=[(_THREADS,)],
)  # fmt: skip
_PLACE = Kernel(
    "index/embedding_order.cu", "order_place", template="THREADS", max_registers=64,
    args="list:ptr table:ptr sorted:ptr fill:ptr tokens:i64 per_chunk:i64 chunk_count:i64 digits:i64 width:i64 "
    "from_ids:i64 ids_int64:i64 rows:i64 start:i64 padding:i64 shift:i64 warps:i64 fill_from:i64 fill_bytes:i64",
    variants=[(_THREADS,)],
)  # fmt: skip
KERNELS = (_COUNT, _PLACE)


def order_steps(
    ids: Meta, ids_name: str, fill: str | int, rows: int, start: int, padding: int, counters: int, fill_bytes: int,
    device: int,
) -> tuple[list[Step], dict[str, Memory], str]:  # fmt: skip
    """Return launches that sort (row, token) pairs of dense `ids`, their scratch, and which of it holds the list.

    They write zeros to as many "counters" as are asked for and to `fill_bytes` of the dense tensor `fill`.
    """
    tokens = row_count((*ids.shape, 1))
    bits = max(1, (rows - 1).bit_length())
    passes = -(-bits // MAX_DIGIT_BITS)
    digit_bits = -(-bits // passes)
    digits = 1 << digit_bits
    columns = -(-digits // 4) * 4
    limit = device_info(device).sm_count * (1 if tokens < MANY_TOKENS else 2)
    each = -(-tokens // min(-(-tokens // MIN_TOKENS), limit))
    chunks = -(-tokens // each)
    width = 1 if each < 2**8 else 2 if each < 2**16 else 4
    build_together(device, (_COUNT, (_THREADS,)), (_PLACE, (_THREADS,)))
    share = -(-fill_bytes // (2 * passes * 16)) * 16  # of the zeros, for each launch
    shared = layout_bytes(digits, chunks, _THREADS) + 2 * columns * (_WARPS + 1)
    sizes = tokens, each, chunks, digits, width
    steps, source = [], ids_name
    for i in range(2 * passes):
        fill_from = min(i * share, fill_bytes)
        fill_share = min(share, fill_bytes - fill_from)
        grid = chunks + -(-fill_share // _FILL_BYTES)
        keys = int(i < 2), int(ids.dtype == torch.int64), rows, start, padding, i // 2 * digit_bits
        if i % 2 == 0:
            asked = shared_for_overlap(4 * columns, shared)
            launch = _COUNT.bind((_THREADS,), device, grid, _THREADS, asked, overlap=i > 0)
            number, target = counters if i == 0 else 0, "counters"
        else:
            launch = _PLACE.bind((_THREADS,), device, grid, _THREADS, shared, overlap=True)
            number, target = _WARPS, f"list_{i // 2 % 2}"
        steps.append(Step(launch, source, "table", target, fill, *sizes, *keys, number, fill_from, fill_share))
        source = source if i % 2 == 0 else target
    scratch = {"table": Memory((chunks * columns * width,), torch.uint8)}
    for i in range(min(passes, 2)):
        scratch[f"list_{i}"] = Memory((tokens,), torch.int64)
    return steps, scratch, source
