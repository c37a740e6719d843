"""Slabs of the vocabulary: which logits are kept, and in which memory."""

from __future__ import annotations

import pytest

from rtkernels.ops.loss import linear_cross_entropy_slabs as slabs


def widths(rows: int, vocabulary: int, columns: int, size: int = 8) -> list[int]:
    return [slab.end - slab.first for slab in slabs.plan(rows, vocabulary, size, columns)]


def test_slabs_cover_the_vocabulary() -> None:
    """The smaller slab comes first; with many rows the last kept one may be half a slab."""
    assert widths(1, 10, 4) == [2, 4, 4] and widths(1, 8, 4) == [4, 4] and widths(1, 3, 4) == [3]
    assert widths(16, 38, 4) == [2] + [4] * 4 + [4, 4, 2] + [4, 4, 2]
    assert widths(100, 38, 4) == [2] + [4] * 9  # none is kept


@pytest.mark.parametrize(("rows", "inside", "kept"), ((16, 5, 3), (8, 9, 1), (3, 9, 1), (1, 9, 1), (1000, 0, 0)))
def test_logits_in_the_memory_of_the_gradient(rows: int, inside: int, kept: int) -> None:
    size, vocabulary = 8, 38
    found = slabs.plan(rows, vocabulary, size, 4)
    assert sum(slab.place is not None for slab in found) == inside
    assert sum(slab.is_kept for slab in found) == inside + kept
    assert all(slab.is_kept for slab in found if slab.place is not None)
    before = last = 0
    for first, end, place, _ in found:
        assert first == last < end
        last = end
        if place is not None:
            assert place >= end * size and place >= before
            before = place + rows * (end - first)
            assert before <= vocabulary * size
    assert last == vocabulary
    outside = rows * sum(end - first for first, end, place, is_kept in found if is_kept and place is None)
    assert outside <= vocabulary * size * 9 / 16


def test_memory_at_the_size_of_a_large_model() -> None:
    """8192 rows, hidden size 4096, a vocabulary of 151936 on 132 SMs: 2 GiB with the gradients."""
    rows, size, vocabulary = 8192, 4096, 151936
    found = slabs.plan(rows, vocabulary, size, 132 * 128)
    outside = sum(slab.end - slab.first for slab in found if slab.is_kept and slab.place is None)
    assert 2 * vocabulary * size + 2 * rows * outside + 4 * rows * size < 2**31 - 2**25
    assert sum(slab.end - slab.first for slab in found if not slab.is_kept) / vocabulary < 0.28
