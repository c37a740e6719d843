"""Switching: which aten overloads run on our kernels, in this process, from now on or inside of a ``with``.

Overrides are registered with the dispatcher, which belongs to the process: every thread sees them, as the threads of
autograd's backward must. Any thread may switch while others call operators. ``override.py`` has what a call does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from rtkernels.aten import table, wrapped
from rtkernels.aten.override import CODE_FILE, Override, Record
from rtkernels.aten.registration import device_keys, registered, torch_kernel
from rtkernels.aten.table import Overload
from rtkernels.errors import ArgumentError, UnsupportedDeviceError
from rtkernels.runtime import env


class _Choice:
    """What one ``enable`` or ``use`` asked for."""

    def __init__(self, rows: dict[str, Overload], keys: tuple[str, ...], record: Record | None) -> None:
        self.rows, self.keys, self.record, self.scoped = rows, keys, record, False

    def same(self, other: _Choice | None) -> bool:
        return other is not None and (self.rows.keys(), self.keys, self.record) == (
            other.rows.keys(), other.keys, other.record,
        )  # fmt: skip


_lock = threading.RLock()
_choices: list[_Choice] = []  # the last one is in force
_in_force: _Choice | None = None
_libraries: list[torch.library.Library] = []
_registered: dict[tuple[str, str], Override | wrapped.Guard] = {}  # by overload and key; some may be switched off
_native: dict[tuple[str, str], Any] = {}  # torch's kernels, by overload and key


def enable(
    include: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    exclude: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    *,
    record: bool | str | os.PathLike[str] | Record | None = None,
) -> None:
    """Let torch's own operators run on kernels of this package, in all threads, until ``disable()``.

    Nothing is compiled here. Calls that our kernels do not cover (``rtkernels.report()`` says which) go to torch.
    Inside of ``rtkernels.emulate()`` CPU tensors are taken as well, by the emulator: for tests. A second ``enable``
    replaces the first; one with the same arguments changes nothing.

    A file of names is a `pathlib.Path` or ``"@path"`` in the place of a name. It has one name per line, or several
    with commas; ``-name`` excludes, ``#`` starts a comment. Lists of YAML with the headings ``include:`` and
    ``exclude:`` are read, too (``- name``, ``[name, name]``); no more of YAML is.

    Args:
        include: What to take: aten overloads (``"sum.dim_IntList"``), operators (``"sum"``: all overloads and the
            in-place form), families (``"row"``), ``"all"``, or files of names; ``"-sum"`` excludes. None: what the
            environment variable ``RTKERNELS_ENABLE`` lists, else the default set, overloads that were measured to be
            faster than torch's. The default set is also what exclusions alone are taken from.
        exclude: What to leave to torch, named likewise.
        record: True writes a line per call to the logger "rtkernels", a path to that file; a function gets the
            overload and the reason why torch's kernel ran, or None if ours did. None or False: calls are counted
            only.

    Raises:
        ArgumentError: A name is no overload, operator or family, or a file cannot be read.
    """
    with _lock, _collector_paused():
        choice = _chosen(include, exclude, record)
        if _choices and not _choices[-1].scoped:
            _choices.pop()
        _choices.append(choice)
        _apply()


def disable() -> None:
    """Give all operators back to torch, whatever was enabled; surrounding ``use`` blocks have no effect any more."""
    with _lock:
        _choices.clear()
        _apply()


@contextlib.contextmanager
def use(
    include: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    exclude: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    *,
    record: bool | str | os.PathLike[str] | Record | None = None,
):
    """``with rtkernels.use(...):`` is ``enable`` for a block of code; what was enabled before is in force after it.

    The block counts for the whole process, since a backward runs in threads of its own. Blocks nest; of several
    threads the one that entered last decides, and leaving takes back one's own choice only.

    Args:
        include: As for ``enable``.
        exclude: As for ``enable``.
        record: As for ``enable``.

    Returns:
        A context manager.
    """
    with _lock, _collector_paused():
        choice = _chosen(include, exclude, record)
        choice.scoped = True
        _choices.append(choice)
        _apply()
    try:
        yield
    finally:
        with _lock:
            if choice in _choices:  # or `disable` was called inside
                _choices.remove(choice)
                _apply()


def enabled() -> list[str]:
    """Return the overloads that are taken now, sorted; empty if nothing is enabled.

    Returns:
        As ``overloads()``.
    """
    return sorted(_in_force.rows) if _in_force is not None else []


# ---- registration ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _collector_paused():
    """Registering makes thousands of small objects that stay: a collection in between looks at all of torch's in vain,
    which takes several times as long as the registration.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.collect(0)  # of what was made here only; else the next allocation might look at everything
            gc.enable()


def _chosen(include: Any, exclude: Any, record: Any) -> _Choice:
    if not hasattr(torch.library, "get_kernel"):
        raise UnsupportedDeviceError(
            f"torch {torch.__version__} has no torch.library.get_kernel, without which calls cannot be given back to "
            f"torch's own kernels; use a later torch"
        )
    rows = table.select(include, exclude)
    for row in rows.values():
        if row.handler is not None:  # the default set was looked at when it was measured
            _refuse_composite(row)
    return _Choice(rows, device_keys(), _recorder(record))


def _refuse_composite(row: Overload) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has_kernel(f"aten::{row.name}", "CompositeImplicitAutograd") and not any(
        has_kernel(f"aten::{row.name}", key) for key in ("CPU", "CUDA")
    )
    if not torch._C._dispatch_has_kernel(f"aten::{row.name}"):
        raise ArgumentError(f"aten has no overload {row.name!r}")  # torch would accept it, and never call it
    if composite and not row.composite:
        raise ArgumentError(f"{row.name} is a composite, which would lose its gradient; take the operators it calls")


def _apply() -> None:
    """Switch to what the last choice asks for; called with the lock.

    While other threads run, nothing is taken from the dispatcher, which would free what they may be executing:
    overrides that are not wanted are switched off and stay until the next switch that no other thread can see.
    """
    global _in_force
    wanted = _choices[-1] if _choices else None
    if wanted is _in_force or (wanted is not None and wanted.same(_in_force)):
        return
    rows: dict[tuple[str, str], Overload | None] = {} if wanted is None else {
        (name, key): row for key in wanted.keys for name, row in wanted.rows.items()
        if _native_kernel(name, key) is not None
    }  # fmt: skip
    for name, call in wrapped.CALLS.items():
        for key in {key for reached, key in rows if reached in call.reached}:
            if _native_kernel(name, key) is not None:
                rows.setdefault((name, key), None)
    _in_force = wanted
    for place, override in _registered.items():
        if place not in rows:
            override.switch(None)
    if _registered.keys() - rows.keys() and _nobody_dispatches():
        _unregister()
    try:
        _register({place: row for place, row in rows.items() if place not in _registered})
        for place, row in rows.items():
            _registered[place].switch(row, wanted.record)
    except BaseException:
        _in_force = None
        for override in _registered.values():
            override.switch(None)
        raise


def _register(rows: dict[tuple[str, str], Overload | None]) -> None:
    if not rows:
        return
    overrides = {
        (name, key): wrapped.Guard(name) if row is None else Override(row, key, _native[name, key])
        for (name, key), row in rows.items()
    }
    _libraries.append(registered({place: override.call for place, override in overrides.items()}))
    _registered.update(overrides)


def _unregister() -> None:
    while _libraries:
        _libraries.pop()._destroy()
    _registered.clear()


def _nobody_dispatches() -> bool:
    """Return True if no other thread, and no call further up in this one, can be inside of an override.

    Threads of autograd's engine have frames while they run Python; while they do not, a thread that waits for them has
    one, or a graph task is active here.
    """
    frames = sys._current_frames()
    if len(frames) > 1 or torch._C._current_graph_task_id() != -1:
        return False
    frame = frames[threading.get_ident()]
    while frame is not None:
        if frame.f_code.co_filename == CODE_FILE:
            return False
        frame = frame.f_back
    return True


def _native_kernel(name: str, key: str) -> Any:
    """Return torch's own kernel, looked up while it is not overridden; None where this torch has none for the key."""
    if (name, key) not in _native:
        try:
            _native[name, key] = None if _is_composite(name, key) else torch_kernel(name, key)
        except RuntimeError:  # a CPU build has no CUDA kernels
            _native[name, key] = None
    return _native[name, key]


def _is_composite(name: str, key: str) -> bool:
    """Return True for an overload with a gradient that is a composite of others at a key (``_fused_rms_norm`` on CPUs).

    With a kernel there, autograd would use its formula instead of the composite, and call a backward that is not there.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        has(f"aten::{name}", "CompositeImplicitAutograd")
        and not has(f"aten::{name}", key)
        and has(f"aten::{name}", "Autograd")
    )


# ---- records --------------------------------------------------------------------------------------------------------


def _recorder(record: Any) -> Record | None:
    if record is None or record is False:
        return None
    if callable(record):
        return record
    if record is True:
        return _log
    if isinstance(record, (str, os.PathLike)):
        return _FileRecord(os.fspath(record))
    raise ArgumentError(f"record is {record!r}; expected True, a path, a function of overload and reason, or None")


def _log(name: str, reason: str | None) -> None:
    env.logger().info("aten::%s: %s", name, "rtkernels" if reason is None else f"torch ({reason})")


class _FileRecord:
    """Writes a line per call to a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise ArgumentError(f"record is the path {path!r}, which cannot be written: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FileRecord) and other.path == self.path

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, name: str, reason: str | None) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{name}\t{'rtkernels' if reason is None else f'torch: {reason}'}\n")
