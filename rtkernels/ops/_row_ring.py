"""How persistent kernels that get their rows through a ring in shared memory (common/row_ring.cuh) are launched."""

from __future__ import annotations

from typing import NamedTuple

from rtkernels._arch import Target
from rtkernels._kernel import DeviceInfo
from rtkernels._layout import group_threads

_RESERVED = 2048  # bytes of shared memory for everything else in a block
_COLUMN_SUM = 4096  # bytes that a block of column_sum takes at most
_STEPS = (8, 16, 32, 64, 100, 132, 164, 196, 228)  # KB of shared memory a multiprocessor may have
_IN_FLIGHT = 64 << 10  # bytes a block asks the copy engine for (rms_norm, 4096 columns: 55.6 µs; 48 KB 60.5, 128 56.8)


def thread_stages(limit: int, stage_bytes: int, most: int) -> int:
    """Return how many rows per group a ring filled by cp.async holds within `limit` bytes, at most `most`."""
    return min(most, (limit - _RESERVED) // stage_bytes)


def has_copy_engine(target: Target) -> bool:
    """Return True if rings of groups of whole warps are filled by the copy engine."""
    return "tma" in target.features


def _beside(shared: int, limit: int) -> int:
    """Return the shared memory to ask for, so that a multiprocessor has some left for a block of column_sum.

    It divides its memory into L1 and shared memory in steps, and takes the smallest that will do for its kernel.
    """
    for step in _STEPS:
        left = step * 1024 - _RESERVED - shared
        if left >= 0:
            return shared if left >= _COLUMN_SUM else min(shared + left + 16, limit - _RESERVED)
    return shared


def ring_memory(
    info: DeviceInfo, block: int, chunks: int, inputs: int, stages: int, *, bulk: bool
) -> tuple[int, int, int]:
    """Return stages as a template argument (0 if the copy engine fills them), how many there are, and their bytes.

    Args:
        info: The device.
        block: Threads of a block.
        chunks: Pieces of 16 bytes that each has of every input.
        inputs: That have rows in the ring.
        stages: Of a ring filled by cp.async.
        bulk: The copy engine may fill the ring, if there is one.
    """
    stage_bytes = block * 16 * chunks * inputs
    if not (bulk and has_copy_engine(info.target)):
        return stages, stages, stages * stage_bytes
    stage_bytes += 8 * (block // 32)  # a barrier for each group of threads, at most
    depth = min(max(2, -(-_IN_FLIGHT // stage_bytes)), (info.shared_per_block - _RESERVED) // stage_bytes)
    return 0, depth, _beside(depth * stage_bytes, info.shared_per_block)


class Ring(NamedTuple):
    """Geometry of a launch: threads of a row, rows at once in a block, blocks, and the ring.

    `stages` is the template argument, 0 for a ring filled by the copy engine; `depth` is how many stages there are.
    """

    threads: int
    groups: int
    blocks: int
    stages: int
    depth: int
    shared: int


def ring(
    info: DeviceInfo,
    rows: int,
    pieces: int,
    chunks: int,
    inputs: int,
    most_threads: int,
    row_threads: int,
    stages: int,
    *,
    bulk: bool = True,
) -> Ring:
    """Return how a ring kernel is launched.

    Args:
        info: The device.
        rows: In all.
        pieces: Of 16 bytes in a row.
        chunks: Of these in a thread.
        inputs: That have rows in the ring.
        most_threads: In a block.
        row_threads: At most for a row.
        stages: Of a ring filled by cp.async.
        bulk: The kernel can have a ring filled by the copy engine.
    """
    threads = group_threads(-(-pieces // chunks), row_threads)
    most = most_threads // threads if threads <= 32 else min(most_threads // threads, 15)
    groups = max(1, min(most, rows // info.sm_count))
    groups += -groups % (32 // min(threads, 32))  # whole warps
    blocks = min(info.sm_count, -(-rows // groups))
    memory = ring_memory(info, groups * threads, chunks, inputs, stages, bulk=bulk and threads >= 32)
    return Ring(threads, groups, blocks, *memory)
