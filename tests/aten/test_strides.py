"""Layout classes and launch arguments: the kernels' index arithmetic visits every element exactly once."""

from __future__ import annotations

import itertools
import random

import pytest

from rtkernels.aten import strides as strides_module
from rtkernels.aten.strides import (
    MAX_DIMS,
    SQUARES,
    THREADS,
    TILE,
    arrange,
    broadcast,
    collapse,
    overlaps_itself,
)


def visited(how, vector: int, operands: int, size: int = 4) -> list[tuple[int, ...]]:
    """Return the offsets of output and inputs of every element, as the kernels of cuda_src/pointwise/kernels.cuh do."""
    if how.kind == "V":
        count, steps, _ = how.ending
        assert how.grid * 2 * THREADS * vector >= count
        return [(i, *[i if steps >> k & 1 else 0 for k in range(operands)]) for i in range(count)]
    sizes, table = how.ending[:MAX_DIMS], how.ending[2 * MAX_DIMS : 6 * MAX_DIMS]
    strides = [table[i * MAX_DIMS : (i + 1) * MAX_DIMS] for i in range(1 + operands)]
    if how.kind == "T":
        dims, _tiles, across, down = how.ending[6 * MAX_DIMS :]
        batches = 1
        for size in sizes[2:dims]:
            batches *= size
        tile = TILE if how.tiled is None else (SQUARES[size],) * 2
        assert how.grid == across * down * batches and across * tile[0] >= sizes[0] and down * tile[1] >= sizes[1]
        steps, each = 0, 1
    else:
        count, dims, steps, vectors = how.ending[6 * MAX_DIMS :]
        each = vector if vectors else 1
        assert how.grid * THREADS * (2 if vectors else 4) >= count
        total = 1
        for size in sizes[:dims]:
            total *= size
        assert total == count
    found = []
    for place in itertools.product(*(range(size) for size in sizes[:dims])):
        base = [sum(i * s for i, s in zip(place, stride[:dims], strict=True)) for stride in strides]
        for k in range(each):
            moves = [k, *[k if each == 1 or steps >> i & 1 else 0 for i in range(operands)]]
            found.append(tuple(b + m for b, m in zip(base, moves, strict=True)))
    return found


def expected(shape, strides) -> list[tuple[int, ...]]:
    places = itertools.product(*(range(size) for size in shape))
    return [tuple(sum(i * s for i, s in zip(p, stride, strict=True)) for stride in strides) for p in places]


def dense(shape, order) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for i in reversed(order):
        strides[i] = step
        step *= shape[i]
    return tuple(strides)


@pytest.mark.parametrize("seed", range(40))
def test_every_element_is_visited(seed: int) -> None:
    chosen = random.Random(seed)
    rank = chosen.randint(1, 4)
    shape = tuple(chosen.choice((1, 2, 3, 8, 17, 32)) for _ in range(rank))
    strides = []
    for _ in range(chosen.randint(1, 4)):
        stride = list(dense(shape, chosen.sample(range(rank), rank)))
        if strides and chosen.random() < 0.4:  # an input that is constant along a dimension
            stride[chosen.randrange(rank)] = 0
        if strides and chosen.random() < 0.2:
            stride = [2 * step for step in stride]
        strides.append(tuple(stride))
    size = chosen.choice((1, 2, 4, 8))
    how = arrange(shape, strides, [size] * len(strides), [chosen.choice((0, 0, size))] * len(strides))
    vector = 8 if size <= 2 else 4
    assert sorted(visited(how, vector, len(strides) - 1, size)) == sorted(expected(shape, strides))


@pytest.mark.parametrize(
    ("shape", "strides", "size", "start", "tiled"),
    [
        ((64, 64), [(64, 1), (64, 1), (1, 64)], 4, 0, 1),
        ((64, 64), [(64, 1), (1, 64)], 2, 0, 0),
        ((2, 32, 64), [(2048, 64, 1), (2048, 1, 32), (64, 0, 1)], 2, 0, 0),
        ((64, 64), [(64, 1), (64, 1), (1, 64)], 4, 8, None),
        ((64, 64), [(64, 1), (64, 1), (1, 64)], 8, 0, None),
        ((64, 62), [(62, 1), (62, 1), (1, 64)], 4, 0, None),
        ((64, 64), [(64, 1), (64, 1), (1, 66)], 4, 0, None),
        ((64, 64), [(64, 1), (1, 64), (1, 64)], 4, 0, None),
    ],
)
def test_squares_want_vectors(monkeypatch, shape, strides, size, start, tiled) -> None:
    monkeypatch.setattr(strides_module, "_MIN_SQUARES", 0)
    how = arrange(shape, strides, [size] * len(strides), [0] * (len(strides) - 1) + [start])
    assert how.kind == "T" and how.tiled == tiled
    assert sorted(visited(how, 16 // size, len(strides) - 1, size)) == sorted(expected(shape, strides))


@pytest.mark.parametrize(
    ("shape", "strides", "kind"),
    [
        ((6, 7), [(7, 1), (7, 1)], "V"),
        ((6, 7), [(1, 6), (1, 6)], "V"),  # dense, in another order
        ((6, 8), [(8, 1), (0, 1)], "R"),
        ((64, 48), [(48, 1), (1, 64)], "T"),
        ((4, 64, 48), [(3072, 48, 1), (3072, 1, 64), (3072, 48, 1)], "T"),
        ((6, 7), [(7, 1), (14, 2)], "G"),
        ((), [(), ()], "V"),
        ((1, 1), [(1, 1), (0, 0)], "V"),
    ],
)
def test_classes(shape, strides, kind: str) -> None:
    assert arrange(shape, strides, [4] * len(strides), [0] * len(strides)).kind == kind


def test_vectors_need_aligned_rows() -> None:
    def vectors(cols: int, start: int) -> int:
        return arrange((5, cols), [(cols, 1), (0, 1)], [4, 4], [0, start]).ending[-1]

    assert vectors(8, 0) == 1
    assert vectors(8, 4) == 0
    assert vectors(7, 0) == 0


def test_more_than_2_to_31_elements() -> None:
    far = arrange((3, 2**30, 2), [(2**31, 2, 1), (0, 4, 2)], [1, 1], [0, 0])
    assert far.index64 and not arrange((3, 2**20, 2), [(2**21, 2, 1), (0, 4, 2)], [1, 1], [0, 0]).index64
    flat = arrange((2**33,), [(1,), (1,)], [1, 1], [0, 0])
    assert flat.kind == "V" and flat.ending[0] == 2**33


def test_too_many_dimensions() -> None:
    shape = (2,) * 7
    assert arrange(shape, [dense(shape, range(7)), (1, 2, 4, 8, 16, 32, 64)], [4, 4], [0, 0]) is None


def test_collapse_and_broadcast() -> None:
    assert collapse((2, 3, 4), [(12, 4, 1), (12, 4, 1)]) == ([24], [[1], [1]])
    assert broadcast((3, 1), (1, 1), (2, 3, 4)) == (0, 1, 0)
    with pytest.raises(ValueError, match="does not broadcast"):
        broadcast((3,), (1,), (4,))
    assert overlaps_itself((3, 4), (0, 1)) and overlaps_itself((3, 4), (2, 1))
    assert not overlaps_itself((3, 4), (1, 3)) and not overlaps_itself((3, 1), (1, 0))
