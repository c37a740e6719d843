"""How persistent kernels whose rows TMA loads (common/bulk_ring.cuh) are launched."""

from __future__ import annotations

from typing import NamedTuple

from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import DeviceInfo
from rtkernels.runtime.layout import group_threads

_ROW_THREADS = 512  # at most for a row; and enough for a block
_MAX_STAGES = 16
_BARRIERS = 8 * _MAX_STAGES  # bytes for each group
_RESERVED = 2048  # bytes of shared memory that the system and the kernel's own variables take


class BulkRing(NamedTuple):
    """Geometry of a launch: threads of a row and of a block, blocks, rows in the ring of a group, groups, bytes."""

    threads: int
    block: int
    blocks: int
    stages: int
    groups: int
    shared: int

    @property
    def helped(self) -> bool:
        """Whether a block has a warp for each group that fetches its rows."""
        return self.block > self.groups * self.threads


class CopyRing(NamedTuple):
    """Geometry of a launch whose threads fetch rows themselves (common/row_ring.cuh): threads of a row and of a block,
    blocks, bytes of shared memory."""

    threads: int
    block: int
    blocks: int
    shared: int


def copy_ring(
    info: DeviceInfo, rows: int, vectors: int, chunks: int, inputs: int, max_threads: int, stages: int
) -> CopyRing:
    """Return how such a kernel is launched; arguments as for ``bulk_ring``, and how many rows a ring has."""
    threads = group_threads(-(-vectors // chunks), _ROW_THREADS)
    limit = max_threads // threads if threads <= 32 else min(max_threads // threads, 15)
    groups = max(1, min(limit, choice_rows(rows) // info.sm_count))
    groups += -groups % (32 // min(threads, 32))  # whole warps
    shared = stages * groups * threads * 16 * chunks * inputs
    return CopyRing(threads, groups * threads, min(info.sm_count, -(-rows // groups)), shared)


def bulk_ring(
    info: DeviceInfo, rows: int, vectors: int, chunks: int, inputs: int, max_threads: int, in_flight: int,
    helped: float, per_thread: int = 0,
) -> BulkRing | None:  # fmt: skip
    """Return how such a kernel is launched, or None if it cannot be: no TMA, or rows shorter than a warp.

    Args:
        info: The device.
        rows: In all.
        vectors: 16-byte vectors in a row.
        chunks: Vectors that one thread has.
        inputs: Tensors with rows in the ring.
        max_threads: Threads of a block, or fewer.
        in_flight: Bytes that a block asks for at a time.
        helped: Groups with fewer rows than this have a warp each that fetches for them, if there is room for these.
        per_thread: Bytes of shared memory that each thread has after the rings.
    """
    threads = group_threads(-(-vectors // chunks), _ROW_THREADS)
    if "tma" not in info.target.features or threads < 32 or rows >= 2**30:
        return None
    # The fewest groups that have enough threads (decisions/norm.md, groups of a block).
    max_groups = min(max_threads // threads, -(-_ROW_THREADS // threads), 15 if threads > 32 else 32)
    groups = max(1, min(max_groups, choice_rows(rows) // info.sm_count))
    block = groups * threads
    stage_bytes = block * 16 * chunks * inputs
    others = groups * _BARRIERS + block * per_thread
    fits = (info.shared_per_block - _RESERVED - others) // stage_bytes
    stages = min(max(2, -(-in_flight // stage_bytes)), _MAX_STAGES, fits)
    if stages < 2:
        return None
    shared = stages * stage_bytes + others
    if choice_rows(rows) < helped * groups * info.sm_count and threads > 32 and block + 32 * groups <= max_threads:
        block += 32 * groups
    return BulkRing(threads, block, min(info.sm_count, -(-rows // groups)), stages, groups, shared)
