"""rtkernels' exceptions; each message says what happened, why, and what to do."""

from __future__ import annotations


class RtkError(Exception):
    """Base class of all rtkernels errors."""


class ArgumentError(RtkError, ValueError):
    """An argument or an environment variable has an invalid value."""


class SourceError(RtkError, RuntimeError):
    """The device sources are missing, or break a rule the include scanner relies on."""


class KernelCompileError(RtkError, RuntimeError):
    """NVRTC rejected a kernel.

    Attributes:
        log: The whole compiler log.
        log_path: The file with that log, or None if it could not be written.
    """

    def __init__(self, message: str, *, log: str = "", log_path: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.log_path = log_path


class ToolkitError(RtkError, RuntimeError):
    """CuPy, NVRTC or the CUDA headers are missing, or do not fit together."""


class UnsupportedDeviceError(RtkError, RuntimeError):
    """The GPU (or the requested target) cannot run this kernel."""


class ResidencyError(UnsupportedDeviceError):
    """A kernel has more blocks that wait for each other than can run on the SMs at the same time."""


class NotWarmError(RtkError, RuntimeError):
    """A kernel is not in the cache, and compiling is not allowed.

    Attributes:
        key: The cache key that was looked up.
        command: The shell command that builds the missing entry.
    """

    def __init__(self, message: str, *, key: str = "", command: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.command = command


# What keeps a kernel from a device, whatever the arguments of a call are.
CANNOT_LAUNCH = (ToolkitError, UnsupportedDeviceError, KernelCompileError, NotWarmError)
