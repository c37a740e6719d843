"""The kernels that build the index of routed tokens, the choice between them, and their launches."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.experts import MAX_EXPERTS, layout_bytes, shared_for_overlap
from rtkernels.runtime.checks import check_dtype
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, build_together
from rtkernels.runtime.layout import vector_bytes
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Step, Steps

INDEX_DTYPES = (torch.int32, torch.int64)
MAP_DTYPES = (torch.bool, torch.uint8)
LIMIT = 2**31 - 1  # of rows, and of choices
_THREADS = 512
_TOKENS_OF_A_THREAD = 8  # kTokens in moe/row_id.cu
MIN_CHOICES = 256  # of a chunk
MIN_FLAGS = 4096
_SMALL_MAP_EXPERTS = 64  # of a block, for small routing maps
_LARGE_MAP_EXPERTS = 128
_TABLE_BYTES = 2**19  # every block of the second launch reads all of the table
CHUNKS_PER_PROCESSOR = 1
MANY_CHOICES = 2**20  # from here on, SMs process two chunks each
MANY_FLAGS = 2**23

_COUNT = Kernel(
    "moe/index.cu", "moe_count", template="THREADS", max_registers=48,
    args="list:ptr table:ptr choices:i64 per_chunk:i64 experts:i64 list_int64:i64 width:i64", variants=[(_THREADS,)],
)  # fmt: skip
_LIST = Kernel(
    "moe/index.cu", "moe_list", template="VEC THREADS", max_registers=64,
    args="map:ptr list:ptr table:ptr tokens:i64 per_chunk:i64 experts:i64 top_k:i64 width:i64",
    variants=[(4, _THREADS), (1, _THREADS)],
)  # fmt: skip
_PLACE = Kernel(
    "moe/index.cu", "moe_place", template="THREADS", max_registers=64,
    args="list:ptr table:ptr row_of:ptr expert_of:ptr slots:ptr counts:ptr offsets:ptr dropped:ptr "
    "choices:i64 per_chunk:i64 experts:i64 row_count:i64 multiple:i64 list_int64:i64 width:i64 list_is_new:i64 "
    "warps:i64",
    variants=[(_THREADS,)],
)  # fmt: skip
_MAP_COUNT = Kernel(
    "moe/row_id.cu", "row_id_count", template="VEC THREADS", max_registers=64,
    args="map:ptr table:ptr tokens:i64 per_chunk:i64 experts:i64 width:i64", variants=[(4, _THREADS), (1, _THREADS)],
)  # fmt: skip
_MAP_PLACE = Kernel(
    "moe/row_id.cu", "row_id_place", template="VEC THREADS", max_registers=64,
    args="map:ptr table:ptr ids:ptr counts:ptr offsets:ptr tokens:i64 per_chunk:i64 experts:i64 row_count:i64 "
    "multiple:i64 width:i64",
    variants=[(4, _THREADS), (1, _THREADS)],
)  # fmt: skip
KERNELS = (_COUNT, _LIST, _PLACE, _MAP_COUNT, _MAP_PLACE)


def is_map(dtype: torch.dtype) -> bool:
    """Return True for a routing map, False for a list of experts; raise an ArgumentError for anything else."""
    if dtype not in INDEX_DTYPES and dtype not in MAP_DTYPES:
        raise ArgumentError(
            f"routing has dtype {str(dtype).removeprefix('torch.')}; expected int32 or int64 for the experts of each "
            f"token, bool or uint8 for a routing map"
        )
    return dtype in MAP_DTYPES


def check(routing: Meta, experts: int, top_k: int, multiple_of: int, rows: int) -> None:
    """Raise an ArgumentError for arguments that no index can be built from."""
    dtype, shape = routing[:2]
    if len(shape) != 2:
        raise ArgumentError(f"routing has shape {tuple(shape)}; expected two dimensions, [tokens, top_k or experts]")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ArgumentError(f"num_experts is {experts}; expected 1 to {MAX_EXPERTS} experts")
    wanted = experts if is_map(dtype) else top_k
    if shape[1] != wanted:
        raise ArgumentError(f"routing has shape {tuple(shape)}; expected {(shape[0], wanted)}")
    if not 0 <= top_k or (is_map(dtype) and not 1 <= top_k <= experts):
        raise ArgumentError(f"top_k is {top_k}; expected 1 to {experts}, the number of experts")
    if not 1 <= multiple_of <= LIMIT:
        raise ArgumentError(f"multiple_of is {multiple_of}; expected 1 to 2^31 - 1")
    if not 0 <= rows <= LIMIT:
        raise ArgumentError(
            f"rows is {rows}; expected 0 to 2^31 - 1 (without `rows` it is the most that can be needed)"
        )
    if shape[0] * top_k > LIMIT:
        raise ArgumentError(f"{shape[0]} tokens with {top_k} choices each; expected fewer than 2^31 choices")


def check_map(routing_map: Meta, multiple_of: int, rows: int) -> None:
    """Raise an ArgumentError for arguments that no dense map can be built from."""
    dtype, shape = routing_map[:2]
    check_dtype("routing_map", dtype, MAP_DTYPES)
    experts = shape[-1] if shape else 0
    check(routing_map, experts, min(experts, 1), multiple_of, rows)  # any number of choices


def _chunked(
    tokens: int, items: int, min_items: int, many: int, experts: int, device: int, step: int, sharing: int = 1
) -> tuple[int, int]:
    """Return how many chunks tokens are cut into, and the tokens of one (a multiple of `step`).

    Args:
        tokens: In all.
        items: What a token has: choices or flags.
        min_items: Items that a chunk should have at least.
        many: Items in all from which there are two chunks for each processor.
        experts: Their counts are what the second launch reads of each chunk.
        device: Index; -1 for the emulator.
        step: Tokens that belong together.
        sharing: Blocks that share a chunk.
    """
    limit = max(int(device_info(device).sm_count * CHUNKS_PER_PROCESSOR), 1) * (1 if tokens * items < many else 2)
    limit = max(limit // sharing, 1)
    limit = min(limit, max(_TABLE_BYTES // (2 * experts), 1))
    wanted = max(1, min(-(-tokens * items // min_items), limit))
    each = max(-(-tokens // (wanted * step)) * step, 1)
    return max(-(-tokens // each), 1), each


def count_bytes(limit: int) -> int:
    """Return how many bytes counts of a chunk need that are no larger than `limit`."""
    return 1 if limit < 2**8 else 2 if limit < 2**16 else 4


def _ranking_warps(experts: int) -> int:
    """Return how many warps rank choices: each has two bytes of shared memory for every expert."""
    return min(_THREADS // 32, 16 if experts <= 1024 else 8 if experts <= 2048 else 4)


def plan_index(routing: Meta, experts: int, top_k: int, multiple_of: int, rows: int, device: int) -> Steps:
    mapped, tokens = is_map(routing.dtype), routing.shape[0]
    chunks, each = _chunked(tokens, top_k, MIN_CHOICES, MANY_CHOICES, experts, device, 1)
    width = count_bytes(each * top_k)
    columns = -(-experts // 4) * 4  # of the table
    warps = _ranking_warps(experts)
    shared = layout_bytes(experts, chunks, _THREADS) + 2 * columns * (warps + 1)
    vec = 4 if vector_bytes(routing.misaligned, experts, limit=4) == 4 else 1
    first, variant = (_LIST, (vec, _THREADS)) if mapped else (_COUNT, (_THREADS,))
    build_together(device, (first, variant), (_PLACE, (_THREADS,)))
    int64 = int(routing.dtype == torch.int64)
    launch = first.bind(variant, device, chunks, _THREADS, shared_for_overlap(4 * columns, shared))
    if mapped:  # the list of choices becomes the experts of the result
        count, choices = Step(launch, "routing", "expert_of", "table", tokens, each, experts, top_k, width), "expert_of"
    else:
        numbers = tokens * top_k, each * top_k, experts, int64, width
        count, choices = Step(launch, "routing", "table", *numbers), "routing"
    launch = _PLACE.bind((_THREADS,), device, chunks, _THREADS, shared, overlap=True)
    numbers = tokens * top_k, each * top_k, experts, rows, multiple_of, int64, width, int(mapped), warps
    results = "row_of", "expert_of", "slots", "counts", "offsets", "dropped"
    place = Step(launch, choices, "table", *results, *numbers)
    return Steps(count, place, scratch={"table": Memory((chunks * (columns * width + 4),), torch.uint8)})


def plan_map(routing_map: Meta, multiple_of: int, rows: int, device: int) -> Steps:
    tokens, experts = routing_map.shape
    variant = (4 if vector_bytes(routing_map.misaligned, experts, limit=4) == 4 else 1, _THREADS)
    share = _SMALL_MAP_EXPERTS if tokens * experts < MANY_FLAGS else _LARGE_MAP_EXPERTS
    blocks = -(-experts // share)  # of a chunk
    sizes = (MIN_FLAGS * blocks, MANY_FLAGS, experts, device, _TOKENS_OF_A_THREAD, blocks)
    chunks, each = _chunked(tokens, experts, *sizes)
    width = count_bytes(each)
    columns = -(-experts // 4) * 4  # of the table
    build_together(device, (_MAP_COUNT, variant), (_MAP_PLACE, variant))
    shared = layout_bytes(experts, chunks, _THREADS)
    launch = _MAP_COUNT.bind(variant, device, (chunks, blocks), _THREADS, shared_for_overlap(0, shared))
    count = Step(launch, "routing_map", "table", tokens, each, experts, width)
    launch = _MAP_PLACE.bind(variant, device, (chunks, blocks), _THREADS, shared, overlap=True)
    results = "ids", "counts", "offsets"
    place = Step(launch, "routing_map", "table", *results, tokens, each, experts, rows, multiple_of, width)
    return Steps(count, place, scratch={"table": Memory((chunks * columns * width,), torch.uint8)})
