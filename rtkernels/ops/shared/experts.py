"""Sorting by expert, token or any other key: what several families need of it."""

from __future__ import annotations

MAX_EXPERTS = 4096


def layout_bytes(experts: int, chunks: int, threads: int) -> int:
    """Return the bytes of shared memory that the layout of rows in common/chunks.cuh takes."""
    columns = -(-experts // 4) * 4
    groups = max(min(threads // (columns // 4), -(-chunks // 8)), 1)
    return 4 * ((2 * groups + 1) * columns + 4)


def shared_for_overlap(own: int, next_kernel: int) -> int:
    """Return how much shared memory to ask for in a kernel that needs `own` bytes and overlaps with the next one.

    A processor splits its memory into cache and shared memory for one kernel at a time. Blocks of the next kernel can
    start while this one runs only if they fit into its split.
    """
    return max(own, next_kernel)
