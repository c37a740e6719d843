"""Which kernel reads and writes operands of given shapes and strides, and with which numbers: plain arithmetic, no
tensors.

After dimensions are ordered by the output's strides and merged where all operands allow it, a launch is of class

* V: one dimension, every operand contiguous or a single element;
* T: an operand is contiguous along another dimension than the output, and goes through a tile in shared memory; with
  ``tiled``, it is the only one, and everything moves by 16 bytes;
* R: several dimensions, the inner one contiguous or constant in every operand and vectors possible;
* G: anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from rtkernels.runtime.layout import divisor
from rtkernels.runtime.layout import overlaps_itself as overlaps_itself

MAX_DIMS = 6
THREADS = 256
TILE = 32, 64  # entries of the output's inner dimension and of the other one
SQUARES = {2: 128, 4: 64}  # entries of both, by the bytes of an element of the one operand that is transposed
_MIN_TILED = 16  # entries of both dimensions from which on tiles pay
_MIN_SQUARES = 16  # tiles of a matrix from which on large ones pay
_MAX_BLOCKS = 2**31 - 1

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """How one launch goes through its elements.

    Attributes:
        kind: "V", "R", "T" or "G".
        grid: Blocks.
        index64: More indices than the divisors serve.
        ending: The arguments of the kernel after its numbers.
        tiled: The number of the only transposed input, for the kernel of 16-byte accesses; None: the general one.
    """

    kind: str
    grid: int
    index64: bool
    ending: Ints
    tiled: int | None = None


def broadcast(shape: Ints, stride: Ints, to: Ints) -> Ints:
    """Return the strides of an operand seen with a larger shape."""
    padded = (1,) * (len(to) - len(shape)) + shape
    steps = (0,) * (len(to) - len(shape)) + stride
    return tuple(
        0 if size == 1 else step if size == given else _raise(shape, to)
        for given, size, step in zip(to, padded, steps, strict=True)
    )


def collapse(shape: Ints, strides: list[Ints]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides, innermost dimension first, of fewer dimensions with the same elements.

    Args:
        shape: Of all operands.
        strides: Of the output, then of the inputs; zeros where an input is constant.
    """
    dims = [i for i, size in enumerate(shape) if size != 1]
    dims.sort(key=lambda i: ([abs(stride[i]) for stride in strides], -i))
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for i in dims:
        if sizes and all(stride[i] == steps[-1] * sizes[-1] for stride, steps in zip(strides, kept, strict=True)):
            sizes[-1] *= shape[i]
            continue
        sizes.append(shape[i])
        for stride, steps in zip(strides, kept, strict=True):
            steps.append(stride[i])
    if not sizes:
        sizes, kept = [1], [[1] for _ in strides]
    return sizes, kept


def arrange(
    shape: Ints, strides: list[Ints], itemsizes: list[int], misaligned: list[int], *, tiles: bool = True
) -> Arrangement | None:
    """Return the launch for operands that all have `shape`; None if too many dimensions are left.

    Args:
        shape: Without zeros.
        strides: Of the output, then of the inputs, in elements; zeros where an input is constant.
        itemsizes: Bytes of an element of each.
        misaligned: Bytes by which each starts after a multiple of 16.
        tiles: The kernel has a form of class T.
    """
    sizes, steps = collapse(shape, strides)
    if len(sizes) > MAX_DIMS:
        return None
    first_input = itemsizes[1] if len(itemsizes) > 1 else 1
    vector = 8 if max(itemsizes[0], first_input) <= 2 else 4  # kVector of cuda_src/pointwise/kernels.cuh
    inner = [step[0] for step in steps]
    flat = inner[0] == 1 and all(step in (0, 1) for step in inner)
    moving = sum(1 << i for i, step in enumerate(inner[1:]) if step)
    aligned = all(
        not step or start % min(16, vector * size) == 0
        for step, start, size in zip(inner, misaligned, itemsizes, strict=True)
    )
    count = 1
    for size in sizes:
        count *= size
    if len(sizes) == 1 and flat:
        return _launch("V", -(-count // (2 * THREADS * vector)), False, (count, moving, int(aligned)))
    if tiles and not flat and (tiled := _tiled(sizes, steps, itemsizes, misaligned)) is not None:
        return tiled
    vectors = (
        flat and aligned and sizes[0] % vector == 0
        and all(step % vector == 0 for operand in steps if operand[0] for step in operand[1:])
    )  # fmt: skip
    if vectors:
        sizes = [sizes[0] // vector, *sizes[1:]]
        steps = [[operand[0] * vector, *operand[1:]] for operand in steps]
        count //= vector
    index64 = count >= 2**31
    grid = -(-count // (THREADS * (2 if vectors else 4)))
    ending = (*_table(sizes, steps, index64), count, len(sizes), moving if vectors else 0, int(vectors))
    return _launch("R" if flat else "G", grid, index64, ending)


def _tiled(
    sizes: list[int], steps: list[list[int]], itemsizes: list[int], misaligned: list[int]
) -> Arrangement | None:  # fmt: skip
    if steps[0][0] != 1 or sizes[0] < _MIN_TILED:
        return None
    other = next(
        (
            i
            for operand in steps[1:] if operand[0] not in (0, 1)
            for i in range(1, len(sizes)) if operand[i] == 1 and sizes[i] >= _MIN_TILED
        ),
        None,
    )  # fmt: skip
    if other is None:
        return None
    order = [0, other, *(i for i in range(1, len(sizes)) if i != other)]
    sizes, steps = [sizes[i] for i in order], [[operand[i] for i in order] for operand in steps]
    tiles = sum(1 << i for i, operand in enumerate(steps[1:]) if operand[0] not in (0, 1) and operand[1] == 1)
    tiled = _square_operand(sizes, steps, itemsizes, misaligned)
    width, height, bits = *TILE, tiles
    if tiled is not None:
        width = height = SQUARES[itemsizes[1 + tiled]]
        bits = sum(1 << i for i, operand in enumerate(steps[1:]) if operand[0] == 1)
    across, down = -(-sizes[0] // width), -(-sizes[1] // height)
    grid = across * down
    for size in sizes[2:]:
        grid *= size
    if grid > _MAX_BLOCKS:
        return None
    return Arrangement("T", grid, False, (*_table(sizes, steps, True), len(sizes), bits, across, down), tiled)


def _square_operand(
    sizes: list[int], steps: list[list[int]], itemsizes: list[int], misaligned: list[int]
) -> int | None:  # fmt: skip
    """Return the only transposed input if all operands allow 16-byte accesses of it, and as many elements of others."""
    transposed = [i for i, operand in enumerate(steps[1:]) if operand[0] not in (0, 1)]
    if len(transposed) != 1 or itemsizes[0] > 4:
        return None
    tiled = transposed[0]
    itemsize = itemsizes[1 + tiled]
    if itemsize not in SQUARES or any(size > itemsize for size in itemsizes[1:]):
        return None
    vector = 16 // itemsize
    if sizes[0] % vector or sizes[1] % vector or sizes[0] * sizes[1] < _MIN_SQUARES * SQUARES[itemsize] ** 2:
        return None
    for i, (operand, size, start) in enumerate(zip(steps, itemsizes, misaligned, strict=True)):
        along = 1 if i == 1 + tiled else 0
        if operand[along] and start % min(16, vector * size):
            return None
        if operand[along] and any(step % vector for j, step in enumerate(operand) if j != along):
            return None
    return tiled


def like_channels_last(shape: Ints, stride: Ints) -> bool:
    """Return True where torch's operators take a tensor for one of channels last, and give results that format.

    Strides decide, whether or not there are gaps: with one channel or with one row of one column a tensor can be dense
    in both formats, and in such cases those of the dimensions of size 1 make the difference.

    Args:
        shape: Of four dimensions (batch, channels, height, width), or of five with a depth; others are not.
        stride: As torch gives it.
    """
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    min_stride = 0
    for i in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[i] == 0 or stride[i] < min_stride or (i == 0 and min_stride == stride[1]):
            return False
        min_stride = stride[i] * max(shape[i], 1)
    return True


def _table(sizes: list[int], steps: list[list[int]], index64: bool) -> list[int]:
    pad = MAX_DIMS - len(sizes)
    table = [*sizes, *[1] * pad]
    table += [0] * MAX_DIMS if index64 else [*map(divisor, sizes), *[0] * pad]
    for operand in [*steps, *[[0] * len(sizes)] * (4 - len(steps))]:
        table += [*operand, *[0] * pad]
    return table


def _launch(kind: str, grid: int, index64: bool, ending: Ints) -> Arrangement | None:
    return Arrangement(kind, grid, index64, ending) if grid <= _MAX_BLOCKS else None


def _raise(shape: Ints, to: Ints) -> int:
    raise ValueError(f"{shape} does not broadcast to {to}")
