"""Capabilities of a device, and reusable scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a device.

    Attributes:
        name: The driver's name of the device.
        sm: Compute capability as a number: 90 for 9.0.
        sm_count: Number of SMs.
        shared_memory: Largest shared memory of a block in bytes.
        memory: Memory of the device in bytes; 0 if unknown.
        fp8_convert: Has conversion instructions for fp8 (8.9 and later).
        fp8_mma: Has fp8 tensor cores (8.9 and later).
        fp4_mma: Has block-scaled fp4 tensor cores (10.0 and later).
        tma: Has TMA and clusters (9.0 and later).
        wgmma: Has warpgroup MMAs (9.0).
    """

    name: str
    sm: int
    sm_count: int
    shared_memory: int
    memory: int
    fp8_convert: bool
    fp8_mma: bool
    fp4_mma: bool
    tma: bool
    wgmma: bool


def capabilities(device: torch.device | str | None = None) -> Capabilities:
    """Return the capabilities of a CUDA device, without launching anything.

    Args:
        device: A CUDA device or its index. Default: the current one.

    Returns:
        A frozen dataclass.

    Raises:
        ArgumentError: `device` is not a CUDA device, or there is none.
    """
    index = _index(device)
    info = device_info(index)
    major, minor = info.target.capability
    sm = 10 * major + minor
    memory = torch.cuda.get_device_properties(index).total_memory
    return Capabilities(
        info.name, sm, info.sm_count, info.shared_per_block, memory, sm >= 89, sm >= 89, sm >= 100, sm >= 90, sm == 90
    )


def _index(device: torch.device | str | int | None) -> int:
    if device is not None and torch.device(device if not isinstance(device, int) else f"cuda:{device}").type != "cuda":
        raise ArgumentError(f"device is {device}; expected a CUDA device")
    if not torch.cuda.is_available():
        raise ArgumentError("there is no CUDA device; expected one")
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    given = torch.device(device).index
    return torch.cuda.current_device() if given is None else given


class Workspace:
    """Memory that is allocated once and returned by name: calls that use it as ``out`` allocate nothing.

    ``workspace("logits", (10, 2048), torch.bfloat16)`` returns the same memory for the same name every time. With
    another shape or dtype it returns a view of that memory if it is large enough. The content is whatever was last
    written there.

    Args:
        device: Device of the memory.
        nbytes: Size of the memory; names that do not fit raise an ArgumentError. Default: each name gets its own memory
            at its first use, and larger memory later if needed, except while a CUDA graph is captured.
    """

    _ALIGN = 256

    def __init__(self, device: torch.device | str = "cuda", nbytes: int | None = None) -> None:
        self.device = torch.device(device)
        self._pool = None if nbytes is None else torch.empty(int(nbytes), dtype=torch.uint8, device=self.device)
        self._used = 0
        self._named: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a contiguous tensor in the memory of this name."""
        need = dtype.itemsize
        for size in shape:
            need *= size
        memory = self._named.get(name)
        if memory is None or memory.numel() < need:
            memory = self._named[name] = self._take(name, need)
        return memory[:need].view(dtype).view(shape)

    def _take(self, name: str, need: int) -> Tensor:
        if self._pool is None:
            return torch.empty(max(need, 1), dtype=torch.uint8, device=self.device)
        first = -(-self._used // self._ALIGN) * self._ALIGN
        if first + need > self._pool.numel():
            raise ArgumentError(
                f"workspace has {self._pool.numel()} bytes and {self._used} are taken; {name} needs {need} more"
            )
        self._used = first + need
        return self._pool[first : first + need]

    @property
    def nbytes(self) -> int:
        """Number of bytes in use."""
        if self._pool is not None:
            return self._pool.numel()
        return sum(memory.numel() for memory in self._named.values())
