"""A CUDA device made of host memory, so that the call path of CUDA tensors runs on a machine without a GPU.

Install it in a fresh process, before the first op of rtkernels is imported (code that is written out at run time keeps
the functions that it finds)::

    from support import stand_in

    device = stand_in.install(launch="emulate")        # or launch="count"
    import rtkernels

    x = torch.randn(64, 1024, dtype=torch.bfloat16).cuda()
    rtkernels.rms_norm(x, w)                            # guards, replay, launch: as on a GPU
    device.launches                                     # how many kernels were launched so far

Tensors on it are CUDA tensors to torch (``is_cuda``, dispatch keys, guards in C++, autograd's device thread); a small
extension (``device.cpp``, built with the host compiler at the first use) gives torch an allocator, a device guard and
kernels for CUDA tensors; in a CUDA build they replace torch's own. Torch's own operators run as their CPU kernels on
the same memory. Of rtkernels only what talks to the driver is replaced: loading kernels, the driver's launch functions
and tensor maps.

``launch="count"`` counts launches and computes nothing: for host time. An allocation and a launch cost another time
than on a machine with a GPU, so host times are to be compared with those of another tree, measured likewise, only
(``python -m bench host --stand-in``).

``launch="emulate"`` decodes the packed arguments and runs the kernel in the host emulator. An address is looked up
among the live allocations, and accesses outside of the allocation are errors; new memory is poisoned.

There is one device, one stream, and no CUDA graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from support.stand_in import _build

H200 = "sm_90a"
_SM_COUNTS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90a": 132, "sm_120a": 188}
_RESIDENT_PER_SM = 1
_installed: StandIn | None = None


class StandIn:
    """The installed device.

    Args:
        module: The extension.
        arch: Target whose kernels are launched.
        sm_count: SMs of the device.
    """

    def __init__(self, module: Any, arch: str, sm_count: int) -> None:
        self.module, self.arch, self.sm_count = module, arch, sm_count
        self.kernels: list[tuple[Any, tuple[Any, ...]]] = []  # by handle, which begin at 1
        self.maps: dict[int, tuple[Any, ...]] = {}  # what a tensor map says, by its address
        # Tables of addresses by their own address: the table, and the address that each of its words holds.
        self.tables: dict[int, tuple[Callable[[], Any], dict[int, int]]] = {}
        self.features = int("".join(filter(str.isdigit, arch)))  # 90 of sm_90a
        self._emulated = 0

    @property
    def launches(self) -> int:
        """Launches so far."""
        return self.module.launches() + self._emulated

    def skip_known_calls(self) -> None:
        """From now on torch's own operators, too, compute nothing in calls like one before: they allocate results."""
        self.module.skip_known_calls(True)

    def count_emulated(self) -> None:
        """One more was emulated."""
        self._emulated += 1

    def handle(self, kernel: Any, variant: tuple[Any, ...]) -> int:
        """Return what stands for the driver's handle of a kernel."""
        self.kernels.append((kernel, variant))
        return len(self.kernels)


def install(launch: str = "count", arch: str = H200, sm_count: int | None = None) -> StandIn:
    """Make this process have a CUDA device.

    Args:
        launch: "count" or "emulate".
        arch: "sm_80", "sm_86", "sm_89", "sm_90a" (the default, an H200) or "sm_120a".
        sm_count: How many SMs it has; None for as many as the usual GPU of its arch.

    Raises:
        RuntimeError: A GPU is visible, another device is installed, or ops are imported already.
    """
    global _installed
    if launch not in ("count", "emulate"):
        raise ValueError(f"launch is {launch!r}; expected 'count' or 'emulate'")
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU; hide it from the stand-in (CUDA_VISIBLE_DEVICES=)")
    if _installed is not None or any(name.startswith("rtkernels.ops.") for name in sys.modules):
        raise RuntimeError("install the stand-in once, in a process that has imported no op of rtkernels")
    device = StandIn(_build.extension(), arch, sm_count or _SM_COUNTS[arch])
    _replace_torch_cuda(device)
    device.module.take_cpu_kernels()
    _replace_driver(device, launch)
    device.module.check_memory(launch == "emulate")
    _installed = device
    return device


# ---- torch ----------------------------------------------------------------------------------------------------------


def _replace_torch_cuda(device: StandIn) -> None:
    """Answer torch's questions about CUDA with constants: methods of C, which cost no Python call."""
    major, minor = divmod(device.features, 10)
    properties = SimpleNamespace(
        name=f"stand-in {device.arch}", major=major, minor=minor, multi_processor_count=device.sm_count,
        total_memory=141 << 30, warp_size=32,
    )  # fmt: skip
    zero, false, stream = int, bool, {0: 0}.get  # int() is 0, bool() False, stream(0) 0
    torch._C._cuda_getDevice = zero
    torch._C._cuda_getCurrentRawStream = stream
    torch._C._cuda_isCurrentStreamCapturing = false
    torch._C._dynamo.guards._empty_strided_cuda = device.module.empty_strided_cuda
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": zero,
        "is_current_stream_capturing": false,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: properties.name,
        "synchronize": lambda device=None: None,
        "device": lambda device: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0, device_index=0, synchronize=lambda: None),
        "empty_cache": lambda: None,
        "default_generators": (_Generator(),),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)


class _Generator:
    """What philox asks of a generator of the device; torch's own random operators draw on the CPU."""

    def __init__(self) -> None:
        self._offset, self._seed = 0, 0

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def initial_seed(self) -> int:
        return self._seed

    def manual_seed(self, seed: int) -> None:
        self._offset, self._seed = 0, seed


# ---- the driver -----------------------------------------------------------------------------------------------------


def _replace_driver(device: StandIn, launch: str) -> None:
    from rtkernels.runtime.launch import driver, kernel, memory, tables, tensor_map

    memory._empty_strided_cuda = device.module.empty_strided_cuda
    memory.current_stream = tables.current_stream = torch._C._cuda_getCurrentRawStream
    memory.is_capturing = tables.is_capturing = torch._C._cuda_isCurrentStreamCapturing
    kernel._built = lambda *_, **__: True
    kernel.Kernel._load = lambda self, variant, ordinal: _loaded(device, self, variant, ordinal)
    plain, extended = device.module.launch, device.module.launch
    if launch == "emulate":
        from support.stand_in import _emulate

        plain, extended = _emulate.plain(device), _emulate.extended(device)
        tables.upload = _emulate.recording_targets(device, tables.upload)
    stands_in = SimpleNamespace(
        launchKernel=plain,
        CUDADriverError=_DriverError,
        occupancyMaxActiveBlocksPerMultiprocessor=lambda *_: _RESIDENT_PER_SM,
    )
    driver._driver = lambda: stands_in
    driver._cuda = lambda: SimpleNamespace(cuCtxGetExecAffinity=lambda *_: 1)  # not known
    driver._launch_kernel_ex = lambda: extended
    driver.make_context = lambda: None
    tensor_map._encode = lambda: _encoder(device)


class _DriverError(RuntimeError):
    status = 0


def _loaded(device: StandIn, kernel: Any, variant: tuple[Any, ...], ordinal: int) -> int:
    """Load a kernel that the target supports without compiling it."""
    from rtkernels.errors import UnsupportedDeviceError
    from rtkernels.runtime.launch.device import device_info

    info = device_info(ordinal)
    kernel.expression(variant)
    if not kernel.supports(info.target):
        raise UnsupportedDeviceError(f"{kernel.op}: kernel {kernel.name} needs {', '.join(kernel.needs)}")
    made = kernel._functions[variant, ordinal] = device.handle(kernel, variant)
    return made


def _encoder(device: StandIn) -> Callable[..., int]:
    def encode(
        made: int, kind: int, rank: int, address: int, sizes: Any, strides: Any, box: Any, steps: Any, interleave: int,
        swizzle: int, *_: int,
    ) -> int:  # fmt: skip
        device.maps[made] = kind, address, tuple(sizes), tuple(strides), tuple(box), bool(swizzle)
        return 0

    return encode
