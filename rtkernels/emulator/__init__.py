"""The host emulator: every kernel's own ``.cu`` compiled for the CPU and run on CPU tensors, with checks.

``with rtkernels.emulate():`` (or ``RTKERNELS_EMULATE=1``) makes every public op, called on CPU tensors, run its
launcher and its device code. ``docs/emulator.md`` says what is checked and how to debug a kernel with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rtkernels.errors import ArgumentError, ToolkitError
from rtkernels.runtime import env, targets

if TYPE_CHECKING:
    from rtkernels.emulator._launch import Bound, EmulatorError
    from rtkernels.emulator._recording import Pointer, points_to

__all__ = [
    "EmulatorError",
    "Pointer",
    "active",
    "bind",
    "emulate",
    "launched",
    "lock",
    "on_host",
    "points_to",
    "recording",
    "settings",
    "unavailable",
]

_FEATURES = {(8, 0): 80, (8, 9): 89, (9, 0): 90, (10, 0): 100, (12, 0): 120}

# One launch runs at a time, and ops of one thread at a time, because plans are built for one target. A fork waits
# until neither is active: the child has no thread that could finish it.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@dataclass(frozen=True)
class Settings:
    """How kernels are emulated."""

    features: int = 90
    order: str | int = "forward"
    races: bool = True
    debug: bool = False

    @property
    def order_code(self) -> int:
        """The order as the runtime takes it."""
        return {"forward": 0, "reverse": 1}[self.order] if isinstance(self.order, str) else self.order + 2


_chosen: ContextVar[Settings | None] = ContextVar("rtkernels_emulate", default=None)


class emulate(contextlib.ContextDecorator):
    """Run every op on CPU tensors with its device code instead of the torch reference.

    Args:
        features: Whose feature macros are on: ``"sm_80"``, ``"sm_89"``, ``"sm_90"``, ``"sm_100"``
            or ``"sm_120"``.
        order: Order of the threads between synchronisation points, and of the blocks: ``"forward"``, ``"reverse"``,
            or the seed (an int, 0 to 2**63 - 1) of a random one. Correct kernels give the same bits for all.
        races: Report accesses to shared memory that conflict and that no barrier orders.
        debug: Compile without optimisation, for stepping through a kernel with gdb.

    Raises:
        ArgumentError: An argument is none of these.
    """

    def __init__(
        self, features: str = "sm_90", order: str | int = "forward", *, races: bool = True, debug: bool = False
    ) -> None:
        if not (order in ("forward", "reverse") or (isinstance(order, int) and 0 <= order < 2**63)):
            raise ArgumentError(f"order is {order!r}; it must be 'forward', 'reverse' or a seed from 0 to 2**63 - 1")
        self._settings = Settings(_number(features), order, races, debug)
        self._tokens: list[Token[Settings | None]] = []

    def __enter__(self) -> emulate:
        self._tokens.append(_chosen.set(self._settings))
        return self

    def __exit__(self, *exc: object) -> None:
        _chosen.reset(self._tokens.pop())


def _number(features: str) -> int:
    capability = targets.parse(features).capability
    if capability not in _FEATURES:
        known = ", ".join(f"sm_{number}" for number in _FEATURES.values())
        raise ArgumentError(f"the emulator has the features of {known}, not of {features}")
    return _FEATURES[capability]


def settings() -> Settings:
    """Return the settings of the innermost ``emulate``, else of ``RTKERNELS_EMULATE``, else the defaults."""
    if chosen := _chosen.get():
        return chosen
    wanted = env.get("EMULATE")
    return Settings(_number(wanted)) if isinstance(wanted, str) else Settings()


def active() -> int | None:
    """Return 80, 89, 90, 100 or 120 while ops on CPU tensors are to be emulated, else None."""
    if chosen := _chosen.get():
        return chosen.features
    return settings().features if env.get("EMULATE") else None


def unavailable() -> str | None:
    """Return why kernels cannot be emulated here (no C++ compiler), or None."""
    from rtkernels.emulator import _build

    try:
        _build.compiler()
    except ToolkitError as error:
        return str(error)
    return None


def launched() -> frozenset[tuple[str, str]]:
    """Return unit and name of every kernel that was emulated in this process, for coverage tests."""
    from rtkernels.emulator import _launch

    return frozenset(_launch.launched)


def recording() -> Any:
    """Return the context a launcher runs in: ``data_ptr()`` knows its tensor, new memory is poisoned."""
    from rtkernels.emulator._recording import Recording

    return Recording()


def bind(
    kernel: Any, variant: tuple[Any, ...], arch: int, grid: Any, block: Any, shared: int = 0, cluster: int = 1,
    *, resident: bool = False, overlap: bool = False,
) -> Bound:  # fmt: skip
    """Return a function that runs a kernel variant on the host; its arguments are those of the kernel.

    Pointers must come from ``Tensor.data_ptr()`` inside ``recording()``, or from ``Pointer.of(tensor)``.

    Args:
        kernel: A ``Kernel`` record.
        variant: Template arguments.
        arch: 80, 89 or 90.
        grid: Blocks in up to three dimensions.
        block: Threads in up to three dimensions.
        shared: Dynamic shared memory in bytes.
        cluster: Blocks in x of a cluster, or that run by turns.
        resident: All blocks run at the same time, and are no cluster.
        overlap: The kernel may start before the previous one of this thread has ended; ignored below 90.
    """
    from rtkernels.emulator._launch import Bound

    return Bound(kernel, variant, arch, grid, block, shared, cluster, resident, overlap)


def on_host(kernel: Any, variant: tuple[Any, ...]) -> Callable[..., None]:
    """Return ``run(grid, block, args, shared_bytes=0)``, which runs one kernel variant on CPU tensors.

    For tests of a kernel by itself, without its op. Features and thread order are those of the innermost ``emulate``.

    Args:
        kernel: A ``Kernel`` record.
        variant: Template arguments.
    """

    def run(grid: Any, block: Any, args: Sequence[Any], shared_bytes: int = 0) -> None:
        from rtkernels.emulator._recording import Pointer

        values = [Pointer.of(value) if isinstance(value, torch.Tensor) else value for value in args]
        bind(kernel, variant, settings().features, grid, block, shared_bytes)(*values)

    return run


def __getattr__(name: str) -> Any:
    if name in ("EmulatorError", "Pointer", "points_to"):
        from rtkernels.emulator import _launch, _recording

        return getattr(_launch if name == "EmulatorError" else _recording, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
