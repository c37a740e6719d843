"""What launchers of kernels built on ``quant/patch_stream.cuh`` share: the grid, tensor maps, counters of tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels._arch import Target
from rtkernels._kernel import Kernel, Launch, Variant, allocator, device_info
from rtkernels._tensor_map import TensorMap, matrix_map

TILE_BYTES = 128 * 128 * 2  # of one input
ON_DEVICE_ONLY = "copies by the tensor copy engine"

_THREADS = 640
_BOX_ROWS, _BOX_COLS = 32, 128
# Tiles per multiprocessor from which on blocks draw tiles from a counter: then they stay together, and memory is faster
# for it. With fewer, clearing the counter costs more than that gains.
_DRAW_TURNS = 12


def supported(target: Target) -> bool:
    """Return whether these kernels are for a target: sm_90, where they were measured."""
    return target.capability == (9, 0)


def available(device: int, target: Target) -> bool:
    """Return whether these kernels run on a device; the emulator (-1) has no copy engine."""
    return device >= 0 and supported(target)


CLEAR = Kernel(
    "quant/patch_counter.cu",
    "clear_counters",
    template="COUNT",
    args="counters:ptr",
    variants=lambda target: [(1,)] if supported(target) else [],
    needs=("tma",),
    max_registers=16,
    emulated="only kernels that copy by the tensor copy engine draw from counters",
)


class PatchLaunch:
    """A kernel with one block per multiprocessor that takes tensor maps first, then pointers, a counter, numbers."""

    __slots__ = ("_allocate", "_clear", "_launch", "_layouts")

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
        draws = tiles >= _DRAW_TURNS * processors
        self._layouts = layouts
        self._launch = kernel.bind(variant, device, min(tiles, processors), _THREADS, shared, overlap=draws)
        self._clear: Launch | None = CLEAR.bind((1,), device, 1, 32) if draws else None
        self._allocate = allocator(device)

    def __call__(self, inputs: list[int], pointers: list[int], numbers: tuple[int, ...]) -> None:
        """Launch on the addresses of the inputs."""
        maps: list[TensorMap] = [
            matrix_map(address, *layout, _BOX_ROWS, _BOX_COLS, swizzle=False)
            for address, layout in zip(inputs, self._layouts, strict=True)
        ]
        counter: Tensor | None = None
        if self._clear is not None:
            counter = self._allocate((1,), (1,), torch.int32)
            self._clear(counter.data_ptr())
        self._launch(*maps, *pointers, 0 if counter is None else counter.data_ptr(), *numbers)
