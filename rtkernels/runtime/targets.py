"""Compilation targets: the target of a device, its features, and the spellings that users may write."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rtkernels.errors import ArgumentError, UnsupportedDeviceError

CI_TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")

MINIMUM = (8, 0)

_SPELLINGS = "accepted forms: 9.0, 90, 90a, sm_90a, compute_90 (capability 8.0 or newer)"
_TARGET = re.compile(r"(?P<prefix>sm_|compute_)?(?P<number>\d{2,3})(?P<suffix>a?)")
_CAPABILITY = re.compile(r"(?P<major>\d{1,2})\.(?P<minor>\d)")

_warned: set[tuple[int, int]] = set()


@dataclass(frozen=True)
class Target:
    """What one cubin or PTX image is compiled for.

    Attributes:
        name: NVRTC's name, ``sm_90a`` or ``compute_90``; also the directory in the cache.
        capability: Compute capability ``(major, minor)``.
        is_ptx: True when the image is PTX that the driver compiles for a newer device.
    """

    name: str
    capability: tuple[int, int]
    is_ptx: bool = False

    @property
    def number(self) -> int:
        """The capability as a number, as in NVRTC: 90 for 9.0."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def is_specific(self) -> bool:
        """True for the ``a`` targets; their images run only on that exact architecture."""
        return self.name.endswith("a")

    @property
    def features(self) -> frozenset[str]:
        """Features that device code for this target may use; a Kernel's ``needs`` is checked against it.

        PTX targets have the features of all later devices, but not the architecture-specific ones.
        """
        found = {"cp_async", "bf16"}
        if self.capability >= (8, 9):
            found.add("fp8_cvt")
        if self.capability >= (9, 0):
            found |= {"tma", "cluster", "pdl"}
        if self.name == "sm_90a":
            found.add("wgmma")
        if self.is_specific and self.capability[0] == 12:
            found.add("block_scaled_mma")
        if self.is_specific and self.capability[0] in (10, 11):
            found.add("tcgen05")
        return frozenset(found)

    def __str__(self) -> str:
        return self.name


def _exact(capability: tuple[int, int]) -> Target:
    """Return the target of a device of this capability if NVRTC knows it."""
    # From 9.0 on, only the `a` targets have the tensor core instructions; other code compiles the same for them.
    suffix = "a" if capability >= (9, 0) else ""
    return Target(f"sm_{capability[0] * 10 + capability[1]}{suffix}", capability)


def parse(text: str) -> Target:
    """Return the target that a user means.

    A bare capability (``9.0``, ``90``) means the target of a device of that capability, here ``sm_90a``; a full name is
    taken literally.

    Raises:
        ArgumentError: It is not a target, or one older than capability 8.0.
    """
    cleaned = text.strip().lower()
    if match := _CAPABILITY.fullmatch(cleaned):
        capability = (int(match["major"]), int(match["minor"]))
        prefix = suffix = ""
    elif match := _TARGET.fullmatch(cleaned):
        capability = divmod(int(match["number"]), 10)
        prefix, suffix = match["prefix"] or "", match["suffix"]
    else:
        raise ArgumentError(f"{text!r} is not a compilation target; {_SPELLINGS}")

    if capability < MINIMUM:
        raise ArgumentError(f"{text!r}: rtkernels has no kernels below capability 8.0; {_SPELLINGS}")
    if suffix and (capability < (9, 0) or prefix == "compute_"):
        raise ArgumentError(f"{text!r}: the suffix 'a' exists for sm_90 and newer only; {_SPELLINGS}")

    number = capability[0] * 10 + capability[1]
    if prefix == "compute_":
        return Target(f"compute_{number}", capability, is_ptx=True)
    if prefix == "sm_" or suffix:
        return Target(f"sm_{number}{suffix}", capability)
    return _exact(capability)


def for_capability(capability: tuple[int, int], supported: Sequence[int]) -> Target:
    """Return the target for a device.

    Args:
        capability: Compute capability of the device.
        supported: The result of ``nvrtc.supported_archs()``; empty if NVRTC cannot be loaded. The exact target is
            returned then, because only a prebuilt cache can provide kernels.

    Raises:
        UnsupportedDeviceError: The device is older than anything that we or this NVRTC can compile for.
    """
    major, minor = capability
    if (major, minor) < MINIMUM:
        raise UnsupportedDeviceError(
            f"this GPU has compute capability {major}.{minor}; rtkernels needs 8.0 (Ampere) or newer"
        )
    number = major * 10 + minor
    if not supported or number in supported:
        return _exact((major, minor))

    older = [arch for arch in supported if MINIMUM[0] * 10 <= arch < number]
    if not older:
        raise UnsupportedDeviceError(
            f"this GPU has compute capability {major}.{minor}, but the installed NVRTC compiles for "
            f"{_listed(supported)} only; install an NVRTC that knows {major}.{minor}"
        )
    chosen = max(older)
    if (major, minor) not in _warned:
        _warned.add((major, minor))
        logging.getLogger("rtkernels").warning(
            "compute capability %s is newer than the installed NVRTC knows: kernels are built as PTX for "
            "compute_%d, and those that need architecture-specific instructions are off; install a newer NVRTC",
            f"{major}.{minor}",
            chosen,
        )
    return Target(f"compute_{chosen}", divmod(chosen, 10), is_ptx=True)


def _listed(archs: Sequence[int]) -> str:
    return ", ".join(f"sm_{arch}" for arch in archs)
