"""Switching: which aten overloads run on our kernels, in this process, from now on or inside of a ``with``.

Overrides are registered with the dispatcher, which belongs to the process: every thread sees them, as the threads of
autograd's backward must. A call of an overload runs its handler; whatever that does not take goes to torch's own
kernel, which was looked up before it was overridden.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from rtkernels import emulator
from rtkernels.aten import table
from rtkernels.aten.report import Count, count_of
from rtkernels.aten.table import NotHandled, Overload
from rtkernels.errors import (
    ArgumentError,
    KernelCompileError,
    NotWarmError,
    RtkError,
    ToolkitError,
    UnsupportedDeviceError,
)
from rtkernels.runtime import env

Record = Callable[[str, str | None], None]
_CANNOT_LAUNCH = (ToolkitError, UnsupportedDeviceError, KernelCompileError, NotWarmError)
_warned: set[str] = set()


class _Inside(threading.local):
    handler = False  # True: one runs in this thread, and aten ops that it calls go to torch


_inside = _Inside()


class _Choice:
    """What one ``enable`` or ``use`` asked for."""

    def __init__(self, rows: dict[str, Overload], keys: tuple[str, ...], record: Record | None) -> None:
        self.rows, self.keys, self.record = rows, keys, record

    def same(self, other: _Choice | None) -> bool:
        return other is not None and (self.rows.keys(), self.keys, self.record) == (
            other.rows.keys(), other.keys, other.record,
        )  # fmt: skip


_lock = threading.RLock()
_choices: list[_Choice] = []  # the last one is in force
_in_force: _Choice | None = None
_library: torch.library.Library | None = None
_native: dict[tuple[str, str], Any] = {}  # torch's kernels, by overload and key


def enable(
    include: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str | None = None,
    *,
    record: bool | str | os.PathLike[str] | Record | None = None,
) -> None:
    """Let torch's own operators run on kernels of this package, in all threads, until ``disable()``.

    Nothing is compiled here. Calls that our kernels do not cover (``rtkernels.report()`` says which) go to torch.
    Inside of ``rtkernels.emulate()`` CPU tensors are taken as well, by the emulator: for tests. A second ``enable``
    replaces the first; one with the same arguments changes nothing.

    Args:
        include: What to take: aten overloads (``"sum.dim_IntList"``), operators (``"sum"``: all overloads and the
            in-place form), families (``"row"``), or ``"all"``. None: the default set, overloads that were measured to
            be faster than torch's.
        exclude: What to leave to torch, named likewise.
        record: True writes a line per call to the logger "rtkernels", a path to that file; a function gets the
            overload and the reason why torch's kernel ran, or None if ours did. None or False: calls are counted
            only.

    Raises:
        ArgumentError: A name is no overload, operator or family.
    """
    with _lock, _collector_paused():
        choice = _chosen(include, exclude, record)
        if _choices and not getattr(_choices[-1], "scoped", False):
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
    include: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str | None = None,
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
    keys = ("CUDA", "CPU") if emulator.active() is not None else ("CUDA",)
    return _Choice(rows, keys, _recorder(record))


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
    """Register what the last choice asks for; called with the lock."""
    global _library, _in_force
    wanted = _choices[-1] if _choices else None
    if wanted is _in_force or (wanted is not None and wanted.same(_in_force)):
        return
    if _library is not None:
        _library._destroy()
        _library = None
    _in_force = wanted
    if wanted is None:
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
            for key in wanted.keys:
                for row in wanted.rows.values():
                    if (native := _native_kernel(row.name, key)) is None:
                        continue
                    library.impl(row.name, _override(row, key, native, wanted.record), key)
    except BaseException:
        library._destroy()
        _in_force = None
        raise
    _library = library


def _native_kernel(name: str, key: str) -> Any:
    """Return torch's own kernel, looked up while it is not overridden; None where this torch has none for the key."""
    if (name, key) not in _native:
        try:
            _native[name, key] = torch.library.get_kernel(f"aten::{name}", key)
        except RuntimeError:  # a CPU build has no CUDA kernels
            _native[name, key] = None
    return _native[name, key]


def _override(row: Overload, key: str, native: Any, record: Record | None) -> Callable[..., Any]:
    """Return what the dispatcher calls. The way of a call that is like one before, or too small, is kept short."""
    name, inside, on_cpu = row.name, _inside, key == "CPU"
    torch_kernel = _torch_kernel(row, native, key)
    count: Count = count_of(name, row.family)
    handler, replays = row.handler, False
    find = key_of = known = None

    def override(*args: Any, **kwargs: Any) -> Any:
        if find is None:
            prepare()
        result = None
        if not on_cpu:
            try:
                result = find(*args, **kwargs)
            except (AttributeError, TypeError):  # a number in the place of a tensor
                pass
        if result is None or type(result) is NotHandled:
            if inside.handler:
                return torch_kernel(*args, **kwargs)
            return handled(args, kwargs) if result is None else given_back(result.reason, args, kwargs)
        count.ours += 1
        if record is not None:
            record(name, None)
        return result

    def given_back(reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count.torch[reason] += 1
        if record is not None:
            record(name, reason)
        return torch_kernel(*args, **kwargs)

    def prepare() -> None:
        """Import the handler and make ``find``, in the first call: ``enable`` is to be quick."""
        nonlocal handler, replays, find, key_of, known
        from rtkernels.aten import replay

        actual = row if row.handler is not None else table.row_of(name)
        handler, replays = actual.handler, actual.replays is True or (actual.replays == "cuda" and not on_cpu)
        measured = name if name in table.MIN_ELEMENTS else row.family
        limits = {measured: 0} if on_cpu else table.MIN_ELEMENTS
        known = replay.replays_of(name, key)
        find, key_of = replay.finder(name, row.family, key, limits, measured, replays=replays)

    def handled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside.handler = True
        try:
            result = emulated(args, kwargs) if on_cpu else called(args, kwargs)
        except _CANNOT_LAUNCH as error:
            reason = _not_launched(name, error)
        except ArgumentError:  # torch raises its own
            reason = "invalid arguments"
        except OverflowError:  # a plan would need more blocks than a grid has
            reason = "too large"
        else:
            if type(result) is not NotHandled:
                count.ours += 1
                if record is not None:
                    record(name, None)
                return result
            reason = result.reason
        finally:
            inside.handler = False
        return given_back(reason, args, kwargs)

    def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not replays:
            return handler(*args, **kwargs)
        from rtkernels.aten.replay import watched

        try:
            found = key_of(*args, **kwargs)
        except (AttributeError, TypeError):
            return handler(*args, **kwargs)
        return handler(*args, **kwargs) if found in known else watched(handler, name, known, found, args, kwargs)

    def emulated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from rtkernels.runtime.launch.device import emulate_features

        features = emulator.active()
        if features is None:
            return _NOT_EMULATING
        with emulator.lock:
            emulate_features(features)  # which may forget what is known
            with emulator.recording():
                try:
                    result = find(*args, **kwargs)
                except (AttributeError, TypeError):
                    result = None
                return called(args, kwargs) if result is None else result

    return override


_NOT_EMULATING = NotHandled("on the CPU")


def _torch_kernel(row: Overload, native: Any, key: str) -> Callable[..., Any]:
    """Return torch's own kernel as a function of what an override is given.

    Numbers in the place of tensors, which the dispatcher unwraps for Python, must be tensors for it. They are given the
    dtype that lets promotion come to the same result; tensors without dimensions get one, or theirs would count no more
    than the number's.
    """
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))  # kernels of a device do not look at it
    if row.family not in ("ew", "copy"):  # others take no numbers for tensors
        return partial(native.call_boxed, keyset)
    name = row.name
    boxed, places = partial(native.call_boxed, keyset), []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not places:  # at the first call: schemas take long to look up
            types = [str(argument.type) for argument in table.schema_of(name).arguments]
            places[:] = [i for i, kind in enumerate(types) if kind == "Tensor"] or [len(types)]
        for i in places:
            if i < len(args) and not isinstance(args[i], torch.Tensor):
                break
        else:
            return boxed(*args, **kwargs)
        numbers = [i for i in places if i < len(args) and not isinstance(args[i], torch.Tensor)]
        given = [value for value in args if isinstance(value, torch.Tensor)]
        values = list(args)
        if not given:  # torch.add(2, 3)
            for i in numbers:
                values[i] = torch.scalar_tensor(args[i], dtype=torch.result_type(args[i], args[i]))
            return boxed(*values, **kwargs)
        for i in numbers:
            values[i] = _number_tensor(args[i], given[0])
        if "out" in kwargs or any(tensor.dim() for tensor in given):
            return boxed(*values, **kwargs)
        lifted = [value.view(1) if any(value is tensor for tensor in given) else value for value in values]
        result = boxed(*lifted, **kwargs)
        in_place = result is lifted[0] or result.data_ptr() == args[0].data_ptr() if args[0] is given[0] else False
        return args[0] if in_place else result.view(())

    return call


def _number_tensor(number: Any, like: torch.Tensor) -> torch.Tensor:
    kind = _KINDS[type(number)]
    lower = kind > (3 if like.is_complex() else 2 if like.is_floating_point() else like.dtype != torch.bool)
    dtype = (
        torch.result_type(like, number) if lower else (torch.bool, torch.int64, torch.float64, torch.complex128)[kind]
    )
    return torch.scalar_tensor(number, dtype=dtype)


_KINDS = {bool: 0, int: 1, float: 2, complex: 3}


def _not_launched(name: str, error: RtkError) -> str:
    if isinstance(error, NotWarmError):
        return "kernel not loaded while a graph is captured or compiling is off"
    if name not in _warned:
        _warned.add(name)
        env.logger().warning("aten::%s runs as torch has it: %s", name, error)
    return "kernel cannot be launched"


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
