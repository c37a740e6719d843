"""What launchers of kernels built on ``quant/tile_stream.cuh`` share: the grid, tensor maps, counters of tiles."""

from __future__ import annotations

from collections.abc import Sequence

from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, Variant
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps, matrix_boxes
from rtkernels.runtime.targets import Target

TILE_BYTES = 128 * 128 * 2  # of one input

_THREADS = 640
_BOX_ROWS = 16
_BOX_COLS = 128
# Tiles per block up to which blocks share tiles out evenly, though some SMs then have none, and above which
# they draw tiles from a counter: then they stay together, and memory is faster for it. Measured on the H200.
_UNIFORM_TILES_PER_BLOCK = 4
_DRAW_TILES_PER_BLOCK = 4


def supported(target: Target) -> bool:
    """Return whether these kernels are for a target: sm_90, where they were measured."""
    return target.capability == (9, 0)


def blocks_for(tiles: int, processors: int) -> int:
    """Return the number of blocks: one per SM, or slightly fewer with equal numbers of tiles."""
    tiles_per_block = -(-tiles // processors)
    uniform = -(-tiles // tiles_per_block)
    shares = tiles_per_block <= _UNIFORM_TILES_PER_BLOCK and uniform >= 0.95 * processors
    return uniform if shares else min(tiles, processors)


def tile_map(name: str, token: str, rows: int, cols: int, stride: int) -> Boxes:
    """Return the tensor map of an input."""
    return matrix_boxes(name, token, rows, cols, stride, _BOX_ROWS, _BOX_COLS, swizzle=False, promote=False)


def stream_steps(
    kernel: Kernel, variant: Variant, device: int, tiles: int, shared: int, maps: Sequence[Boxes],
    tensors: Sequence[str | int], numbers: Sequence[int], *after: Step, scratch: dict[str, Memory] | None = None,
) -> Steps:  # fmt: skip
    """Return the launch of a kernel with a block per SM or less.

    Args:
        kernel: Of sm_90; takes tensor maps, then pointers, a counter, numbers.
        variant: Its template arguments.
        device: CUDA ordinal.
        tiles: As many as there can be.
        shared: Dynamic shared memory in bytes.
        maps: Of its inputs.
        tensors: Names of the others.
        numbers: Those that follow the counter.
        after: Launches that follow.
        scratch: As for ``Steps``.
    """
    processors = device_info(device).sm_count
    launch = kernel.bind(variant, device, blocks_for(tiles, processors), _THREADS, shared)
    draws = tiles > _DRAW_TILES_PER_BLOCK * processors
    step = Step(launch, *maps, *tensors, "counter" if draws else 0, *numbers)
    return Steps(step, *after, scratch=scratch, zeros={"counter": 1} if draws else None)
