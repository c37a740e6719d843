"""Devices as launchers see them: a GPU, or the GPU that the host emulator emulates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from rtkernels.errors import ToolkitError
from rtkernels.runtime import env, targets
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.targets import Target


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device that launchers use."""

    name: str
    target: Target
    sm_count: int
    shared_per_block: int


_emulated_number = 90


def emulate_features(number: int) -> None:
    """Make device -1 an emulated GPU with the features of sm_<number>, and drop plans for another one.

    The caller must hold ``emulator.lock`` until its launches are done, because other threads may emulate other targets.
    """
    global _emulated_number
    if number != _emulated_number:
        _emulated_number = number
        Plans.forget_all()


@contextmanager
def emulating(features: int) -> Iterator[None]:
    """Launch on device -1, an emulated GPU with the features of sm_<number>. One thread at a time."""
    from rtkernels import emulator

    with emulator.lock:
        emulate_features(features)
        with emulator.recording():
            yield


def emulated_features() -> int:
    """Return the number of the emulated target, 90 for sm_90."""
    return _emulated_number


def device_info(device: int) -> DeviceInfo:
    """Return the properties of a CUDA device, or of the emulated one for -1."""
    if device < 0:
        # Few SMs, so that blocks of persistent kernels process several rows even in small tests.
        name = f"sm_{_emulated_number}" + ("a" if _emulated_number >= 90 else "")
        target = Target(name, divmod(_emulated_number, 10))
        return DeviceInfo(f"emulated {target}", target, 4, shared_limit(target))
    return _cuda_info(device)


@cache
def _cuda_info(device: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(device)
    override = env.get("ARCH")
    target = targets.parse(override) if override else _target_of((properties.major, properties.minor))
    return DeviceInfo(properties.name, target, properties.multi_processor_count, shared_limit(target))


def shared_limit(target: Target) -> int:
    """Return the largest shared memory of a block on a target, in bytes."""
    known = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return known.get(target.capability, 99) * 1024


def _target_of(capability: tuple[int, int]) -> Target:
    # Every NVRTC that CuPy supports knows 9.0, so common devices do not need NVRTC to be loaded here.
    if capability <= (9, 0):
        return targets.for_capability(capability, ())
    try:
        supported = nvrtc.supported_archs()
    except ToolkitError:
        supported = ()
    return targets.for_capability(capability, supported)
