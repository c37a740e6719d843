"""What launchers of kernels built on ``quant/tile_stream.cuh`` share: the grid, tensor maps, counters of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, Variant
from rtkernels.runtime.launch.memory import fresh_zeros
from rtkernels.runtime.launch.tensor_map import matrix_map
from rtkernels.runtime.targets import Target

TILE_BYTES = 128 * 128 * 2  # of one input

_THREADS = 640
_BOX_ROWS, _BOX_COLS = 16, 128
# Tiles per block up to which blocks share tiles out evenly, though some multiprocessors then have none, and above which
# they draw tiles from a counter: then they stay together, and memory is faster for it. Measured on the H200.
_EVEN_TURNS = 4
_DRAW_TURNS = 4


def supported(target: Target) -> bool:
    """Return whether these kernels are for a target: sm_90, where they were measured."""
    return target.capability == (9, 0)


def blocks_for(tiles: int, processors: int) -> int:
    """Return how many blocks there should be: one per multiprocessor, or a few less that have as many tiles each."""
    turns = -(-tiles // processors)
    even = -(-tiles // turns)
    return even if turns <= _EVEN_TURNS and even >= 0.95 * processors else min(tiles, processors)


class PatchLaunch:
    """A kernel with a block per multiprocessor or less that takes tensor maps, then pointers, a counter, numbers."""

    __slots__ = ("_device", "_draws", "_launch", "_layouts")

    def __init__(
        self, kernel: Kernel, variant: Variant, device: int, tiles: int, shared: int, layouts: list[tuple[Any, ...]]
    ) -> None:
        """Bind the kernel.

        Args:
            kernel: Of sm_90.
            variant: Its template arguments.
            device: CUDA ordinal.
            tiles: The most there can be.
            shared: Dynamic shared memory in bytes.
            layouts: Of each input: token, rows, columns, elements from row to row.
        """
        processors = device_info(device).sm_count
        self._launch = kernel.bind(variant, device, blocks_for(tiles, processors), _THREADS, shared)
        self._device, self._layouts, self._draws = device, layouts, tiles > _DRAW_TURNS * processors

    def __call__(self, inputs: Sequence[int], pointers: Sequence[int], numbers: tuple[int, ...]) -> None:
        """Launch on the addresses of the inputs."""
        maps = [
            matrix_map(address, *layout, _BOX_ROWS, _BOX_COLS, swizzle=False, promote=False)
            for address, layout in zip(inputs, self._layouts, strict=True)
        ]
        counter = fresh_zeros(self._device, 1) if self._draws else None
        self._launch(*maps, *pointers, 0 if counter is None else counter.data_ptr(), *numbers)
