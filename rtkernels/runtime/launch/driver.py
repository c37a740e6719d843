"""The only file that launches: functions that pack their arguments into one buffer and call the driver.

``Kernel.bind`` creates them with function, device, grid and block fixed. They launch on torch's current stream.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import CodeType
from typing import Any

import torch

from rtkernels.errors import ResidencyError
from rtkernels.runtime.build import nvrtc

Launch = Callable[..., None]


def no_blocks(*_: Any) -> None:
    """A launch without blocks: does nothing."""


_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INVALID_CONTEXT = 201
_COOPERATIVE_LAUNCH_TOO_LARGE = 720
_SM_COUNT_AFFINITY = 0  # CU_EXEC_AFFINITY_TYPE_SM_COUNT
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_CONFIG = struct.Struct("=7I4xQQI4x")  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their count
_MAX_GAP = 8  # up to so many fixed arguments are packed again, which is cheaper than a second call of pack_into
_ATTRIBUTE = struct.Struct("=I4x3I52x")  # CUlaunchAttribute: id, value of up to three words


class Arguments:
    """How the arguments of a launch are passed: eight bytes each in a buffer, tensor maps by their addresses.

    Args:
        maps: Number of tensor maps, which come first.
        kinds: A ``struct`` format character for each argument after them.
        fixed: Arguments that are the same in every launch, by position after the tensor maps. Launches do not take
            them; they are written when a slot is created.
        struct: The kernel takes the buffer as one parameter, not every argument as its own.
    """

    def __init__(
        self, maps: int, kinds: str, fixed: Mapping[int, int | float] | None = None, *, struct: bool = False
    ) -> None:
        self.maps, self.fixed, self._kinds, self._struct = maps, dict(fixed or {}), kinds, struct
        # The ranges that a launch writes. A few fixed arguments are written again if that avoids a separate
        # ``pack_into`` call for the arguments before and after them.
        self.stretches: list[tuple[int, int]] = []
        for place in range(len(kinds)):
            if place in self.fixed:
                continue
            first, end = self.stretches[-1] if self.stretches else (place, place)
            if self.stretches and place - end <= _MAX_GAP:
                self.stretches[-1] = first, place + 1
            else:
                self.stretches.append((place, place + 1))

    def slot(self) -> _Slot:
        """Return memory for the arguments of one launch."""
        slot = _Slot(self.maps, len(self._kinds), struct=self._struct)
        for place, value in self.fixed.items():
            struct.pack_into("=" + self._kinds[place], slot.buffer, 8 * place, value)
        return slot

    def scope(self) -> dict[str, Any]:
        """Return the names that the argument-writing lines of a launch refer to."""
        packs = {f"pack_{i}": struct.Struct("=" + self._kinds[i:end]).pack_into for i, end in self.stretches}
        return packs | {f"fixed_{place}": value for place, value in self.fixed.items()}

    def layout(self) -> _Layout:
        """Return everything that the code of a launch depends on."""
        return self.maps, len(self._kinds), frozenset(self.fixed), tuple(self.stretches)


_Layout = tuple[int, int, frozenset[int], tuple[tuple[int, int], ...]]


def _parameters(layout: _Layout) -> str:
    maps, count, fixed, _ = layout
    return ", ".join([*(f"map_{i}" for i in range(maps)), *(f"argument_{i}" for i in range(count) if i not in fixed)])


def _writing(layout: _Layout) -> str:
    """Return the lines of a launch that write its arguments to ``slot``."""
    maps, _, fixed, stretches = layout
    lines = [f"slot.table[{i}] = map_{i}.address" for i in range(maps)]
    for first, end in stretches:
        values = ", ".join(f"{'fixed' if i in fixed else 'argument'}_{i}" for i in range(first, end))
        lines.append(f"pack_{first}(slot.buffer, {8 * first}, {values})")
    return "".join(f"    {line}\n" for line in lines)


def launcher(
    function: int, arguments: Arguments, device: int, grid: tuple[int, ...], block: int, shared: int, *,
    overlap: bool, cluster: int, resident: bool = False,
) -> Launch:  # fmt: skip
    """Return a function of the kernel's arguments that launches it.

    Args:
        function: The driver's handle of the kernel.
        arguments: How the arguments are passed.
        device: CUDA ordinal.
        grid: Blocks in three dimensions.
        block: Threads per block.
        shared: Dynamic shared memory in bytes.
        overlap: Whether it may start before the previous kernel of its stream has ended.
        cluster: Blocks per cluster.
        resident: All blocks run at the same time, or the launch raises a ResidencyError
            (see :func:`max_resident_blocks`).
    """
    attributes = b""
    if overlap:
        attributes += _ATTRIBUTE.pack(_PROGRAMMATIC_SERIALIZATION, 1, 0, 0)
    if cluster > 1:
        attributes += _ATTRIBUTE.pack(_CLUSTER_DIMENSION, cluster, 1, 1)
    if resident:
        attributes += _ATTRIBUTE.pack(_COOPERATIVE, 1, 0, 0)
    if attributes:
        return _extended_launcher(function, arguments, device, grid, block, shared, attributes)
    return _plain_launcher(function, arguments, device, grid, block, shared)


def allow_shared(function: int, limit: int) -> None:
    """Allow a kernel up to `limit` bytes of shared memory, including static shared memory."""
    driver = _driver()
    static = driver.funcGetAttribute(_STATIC_SHARED, function)
    driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, limit - static)


@cache
def max_resident_blocks(function: int, device: int, sm_count: int, block: int, shared: int) -> int:
    """Return how many blocks of a kernel can run at the same time on the SMs that this process may use.

    Args:
        function: The driver's handle of the kernel.
        device: CUDA ordinal.
        sm_count: SMs of the device. MPS and green contexts may give a process fewer.
        block: Threads per block.
        shared: Dynamic shared memory in bytes.
    """
    with torch.cuda.device(device):
        answer = (ctypes.c_uint32 * 16)()  # CUexecAffinityParam: type, value
        status = _cuda().cuCtxGetExecAffinity(answer, _SM_COUNT_AFFINITY)
        if status == _INVALID_CONTEXT:
            make_context()
            status = _cuda().cuCtxGetExecAffinity(answer, _SM_COUNT_AFFINITY)
        if status == 0 and answer[1] > 0:
            sm_count = min(sm_count, answer[1])
        return sm_count * _driver().occupancyMaxActiveBlocksPerMultiprocessor(function, block, shared)


class _Slot:
    """One argument buffer, and the array of pointers into it that the driver takes.

    The driver copies tensor maps from their own memory, so the array points to them directly. It copies everything
    before it returns, but the GIL is released meanwhile, so a slot belongs to one call.
    """

    __slots__ = ("buffer", "config", "pointers", "send", "stream", "table")

    def __init__(self, maps: int, count: int, *, struct: bool) -> None:
        self.buffer = (ctypes.c_uint64 * count)()
        base = ctypes.addressof(self.buffer)
        parameters = 1 if struct else count
        self.table = (ctypes.c_uint64 * (maps + parameters))(*[0] * maps, *range(base, base + 8 * parameters, 8))
        self.pointers = ctypes.addressof(self.table)
        self.config = (ctypes.c_uint8 * _CONFIG.size)()


def _plain_launcher(
    function: int, arguments: Arguments, device: int, grid: tuple[int, ...], block: int, shared: int
) -> Launch:
    scope = {
        "function": function,
        "grid_x": grid[0],
        "grid_y": grid[1],
        "grid_z": grid[2],
        "block": block,
        "shared": shared,
        "launch_kernel": _driver().launchKernel,
        "DriverError": _driver().CUDADriverError,
    }
    return _generated(_SEND_PLAIN, arguments, device, arguments.slot, scope)


def _extended_launcher(
    function: int, arguments: Arguments, device: int, grid: tuple[int, ...], block: int, shared: int,
    attributes: bytes,
) -> Launch:  # fmt: skip
    # CuPy has no launch with attributes, so this calls the driver directly (about 1 µs more host time).
    kept = ctypes.create_string_buffer(attributes, len(attributes))
    config = *grid, block, 1, 1, shared
    given = ctypes.addressof(kept), len(attributes) // _ATTRIBUTE.size

    def new_slot() -> _Slot:
        slot = arguments.slot()
        slot.stream = -1
        # Created once: ctypes takes a third of a microsecond to convert four numbers.
        given = (ctypes.addressof(slot.config), function, slot.pointers)
        slot.send = partial(_launch_kernel_ex(), *map(ctypes.c_void_p, given), None)
        return slot

    def set_stream(slot: _Slot, stream: int) -> None:
        _CONFIG.pack_into(slot.config, 0, *config, stream, *given)
        slot.stream = stream

    def fail(status: int) -> None:
        if status == _COOPERATIVE_LAUNCH_TOO_LARGE:
            raise ResidencyError(
                f"{grid[0] * grid[1] * grid[2]} blocks of {block} threads must run at the same time and do not fit on "
                f"the SMs of cuda:{device} that this process may use (MPS or a green context limits them)"
            )
        raise _driver().CUDADriverError(status)

    scope = {"set_stream": set_stream, "fail": fail, "keep_alive": kept}
    return _generated(_SEND_EXTENDED, arguments, device, new_slot, scope)


# The ends of launch functions, after the arguments are written to ``slot``.
_GRID = "grid_x, grid_y, grid_z, block, 1, 1"
_LAUNCH = f"launch_kernel(function, {_GRID}, shared, current_stream(device), slot.pointers, 0)"
_SEND_PLAIN = f"""\
    if only_device or current_device() == device:
        try:
            {_LAUNCH}
        except DriverError as error:
            if error.status != INVALID_CONTEXT:
                raise
            make_context()
            launch(PARAMETERS)
    else:
        with on_device(device):
            {_LAUNCH}
    give_back(slot)
"""
_SEND_EXTENDED = """\
    stream = current_stream(device)
    if stream != slot.stream:
        set_stream(slot, stream)
    if only_device or current_device() == device:
        status = slot.send()
        if status == INVALID_CONTEXT:
            make_context()
            status = slot.send()
    else:
        with on_device(device):
            status = slot.send()
    give_back(slot)
    if status:
        fail(status)
"""


def _generated(
    send: str, arguments: Arguments, device: int, new_slot: Callable[[], _Slot], scope: dict[str, Any]
) -> Launch:
    """Return the launch function that ends in `send`, one of the two above; `scope`: the names that it refers to."""
    slots: list[_Slot] = []
    scope |= {
        "device": device,
        "take": slots.pop,
        "give_back": slots.append,
        "new_slot": new_slot,
        **arguments.scope(),
        "INVALID_CONTEXT": _INVALID_CONTEXT,
        "make_context": make_context,
        "only_device": torch.cuda.device_count() == 1,
        "current_device": torch._C._cuda_getDevice,
        "current_stream": torch._C._cuda_getCurrentRawStream,
        "on_device": torch.cuda.device,
    }
    exec(_launch_code(arguments.layout(), send), scope)
    return scope["launch"]


@cache
def _launch_code(layout: _Layout, send: str) -> CodeType:
    """Return the code of a flat function with a name for each argument: its host time is part of every call."""
    names = _parameters(layout)
    source = f"""
def launch({names}):
    try:
        slot = take()
    except IndexError:
        slot = new_slot()
{_writing(layout)}{send.replace("PARAMETERS", names)}"""
    return compile(source, f"<rtkernels launch of {names}>", "exec")


def make_context() -> None:
    """Give this thread a CUDA context.

    A thread has none until its first CUDA call, and torch's allocator may not have needed one.
    """
    nvrtc.import_cupy().cuda.runtime.free(0)


@cache
def _launch_kernel_ex() -> Callable[..., int]:
    function = _cuda().cuLaunchKernelEx  # takes four pointers
    function.restype = ctypes.c_int
    return function


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _driver() -> Any:
    nvrtc.import_cupy()
    from cupy_backends.cuda.api import driver

    return driver
