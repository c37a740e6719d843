"""What a device can do, and scratch memory that is made one time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info


@dataclass(frozen=True)
class Capabilities:
    """What a device can do.

    Attributes:
        name: As the driver gives it.
        sm: Compute capability as a number: 90 for 9.0.
        sm_count: Multiprocessors.
        shared_memory: The most shared memory of a block in bytes.
        memory: Of the device in bytes; 0 where it is not known.
        fp8_convert: Instructions between fp8 and other types (8.9 and later).
        fp8_mma: fp8 tensor cores (8.9 and later).
        fp4_mma: Block-scaled fp4 tensor cores (10.0 and later).
        tma: Bulk tensor copies and clusters (9.0 and later).
        wgmma: Products of whole warpgroups (9.0).
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
    """Return what a CUDA device can do, without launching anything.

    Args:
        device: A CUDA device, or its number; None for the current one.

    Returns:
        A frozen dataclass.
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
    """Memory made one time and handed out by name: calls that use it as ``out`` allocate nothing.

    ``workspace("logits", (10, 2048), torch.bfloat16)`` gives the same memory each time it is asked for the same name;
    with another shape or dtype a view of it, as long as that fits. What it holds is whatever was last written there.

    Args:
        device: Where the memory is.
        nbytes: How much there is. Names beyond it raise an ArgumentError. None: each name gets memory of its own when
            it is first asked for, more if it needs more later (not while a CUDA graph is captured).
    """

    _ALIGN = 256

    def __init__(self, device: torch.device | str = "cuda", nbytes: int | None = None) -> None:
        self.device = torch.device(device)
        self._pool = None if nbytes is None else torch.empty(int(nbytes), dtype=torch.uint8, device=self.device)
        self._used = 0
        self._named: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a dense tensor in the memory of this name."""
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
                f"workspace has {self._pool.numel()} bytes and {self._used} are taken; {name} wants {need} more"
            )
        self._used = first + need
        return self._pool[first : first + need]

    @property
    def nbytes(self) -> int:
        """How many bytes it has taken."""
        if self._pool is not None:
            return self._pool.numel()
        return sum(memory.numel() for memory in self._named.values())
