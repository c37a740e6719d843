"""Launches of the stand-in device in the host emulator: from packed arguments back to a kernel and its tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from rtkernels import emulator
from rtkernels.emulator import Pointer, points_to
from rtkernels.emulator._dependent import history
from rtkernels.runtime.launch import driver
from rtkernels.runtime.launch.tensor_map import _TYPES, EmulatedMap

_KINDS = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "f64": ctypes.c_double}
_BYTES_OF_MAP = dict(_TYPES.values())  # by number
_PROGRAMMATIC, _COOPERATIVE, _CLUSTER = (
    driver._PROGRAMMATIC_SERIALIZATION, driver._COOPERATIVE, driver._CLUSTER_DIMENSION,
)  # fmt: skip


def plain(device: Any) -> Callable[..., int]:
    """Return what stands for CuPy's ``launchKernel``."""

    def launch(
        function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, pointers: int,
        extra: int,
    ) -> int:  # fmt: skip
        return _run(device, function, (gx, gy, gz), (bx, by, bz), shared, pointers)

    return launch


def extended(device: Any) -> Callable[..., int]:
    """Return what stands for the driver's ``cuLaunchKernelEx``."""

    def launch(config: Any, function: Any, pointers: Any, extra: Any) -> int:
        packed = ctypes.string_at(config.value, driver._CONFIG.size)
        gx, gy, gz, bx, by, bz, shared, _, attributes, count = driver._CONFIG.unpack(packed)
        found = {}
        for i in range(count):
            size = driver._ATTRIBUTE.size
            name, *words = driver._ATTRIBUTE.unpack(ctypes.string_at(attributes + i * size, size))
            found[name] = words
        return _run(
            device, function.value, (gx, gy, gz), (bx, by, bz), shared, pointers.value,
            cluster=found.get(_CLUSTER, [1])[0], resident=_COOPERATIVE in found, overlap=_PROGRAMMATIC in found,
        )  # fmt: skip

    return launch


def recording_targets(
    device: Any, upload: Callable[..., torch.Tensor]
) -> Callable[[numpy.ndarray, int, Callable[[], Mapping[int, torch.Tensor]]], torch.Tensor]:
    """Return an ``upload`` that remembers which words of a table are addresses."""

    def remembering(words: numpy.ndarray, ordinal: int, targets: Callable[[], Mapping[int, torch.Tensor]]) -> Any:
        table = upload(words, ordinal, targets)
        if ordinal >= 0:
            addresses = {word: t.data_ptr() for word, t in targets().items()}
            device.tables[table.data_ptr()] = weakref.ref(table), addresses
        return table

    return remembering


def _run(
    device: Any, function: int, grid: tuple[int, ...], block: tuple[int, ...], shared: int, pointers: int, *,
    cluster: int = 1, resident: bool = False, overlap: bool = False,
) -> int:  # fmt: skip
    kernel, variant = device.kernels[function - 1]
    words = _addresses(kernel, pointers)
    blocks = _Blocks(device)
    values: list[Any] = []
    for word, (_, kind) in zip(words, kernel.args, strict=True):
        if kind == "tmap":
            values.append(_map(device, blocks, word))
            continue
        value = _KINDS[kind].from_address(word).value
        values.append(blocks.pointer(value) if kind == "ptr" and value else value)
    together = grid[0] if resident else cluster
    history().begin_op()
    how = {"resident": resident, "overlap": overlap}
    emulator.bind(kernel, variant, device.features, grid, block, shared, together, **how)(*values)
    device.count_emulated()
    return 0


def _addresses(kernel: Any, pointers: int) -> list[int]:
    """Return where each argument of a launch is."""
    maps = sum(kind == "tmap" for _, kind in kernel.args)
    count = len(kernel.args)
    words = list((ctypes.c_uint64 * (maps + 1 if kernel.struct else count)).from_address(pointers))
    return words if not kernel.struct else [*words[:maps], *range(words[maps], words[maps] + 8 * (count - maps), 8)]


class _Blocks:
    """The allocations that one launch reaches, as tensors of bytes: one object for each."""

    def __init__(self, device: Any) -> None:
        self._device, self._found = device, {}

    def pointer(self, address: int) -> Any:
        """Return an address with the allocation that it is in; a plain number if it is in none."""
        block = self._device.module.block_of(address)
        if block is None:
            raise RuntimeError(f"a launch gets the address {address:#x}, which is in no live allocation")
        start, size = block
        if start not in self._found:
            memory = (ctypes.c_uint8 * size).from_address(start)
            self._found[start] = tensor = torch.frombuffer(memory, dtype=torch.uint8)
            table, targets = self._device.tables.get(start, (lambda: None, {}))
            if table() is not None:  # or its memory is another one's by now
                # Memory of a table that is gone may hold anything, and a table may outlive what it names.
                words = (ctypes.c_uint64 * (size // 8)).from_address(start)
                there = {word: at for word, at in targets.items() if at and word < len(words) and words[word] == at}
                there = {word: at for word, at in there.items() if self._device.module.block_of(at) is not None}
                points_to(tensor, {word: self.pointer(at).tensor for word, at in there.items()})
        made = Pointer(address)
        made.tensor = self._found[start]
        return made


def _map(device: Any, blocks: _Blocks, address: int) -> EmulatedMap:
    kind, first, sizes, strides, box, swizzle = device.maps[address]
    return EmulatedMap(blocks.pointer(first), _BYTES_OF_MAP[kind], sizes, strides, box, swizzle)
