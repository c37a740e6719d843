"""What the dispatcher calls for an overload that is taken: its handler, or a repetition of what that launched before;
whatever the handler does not take goes to torch's own kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rtkernels import emulator
from rtkernels.aten import table, wrapped
from rtkernels.aten.report import count_of
from rtkernels.aten.table import NotHandled, Overload
from rtkernels.errors import CANNOT_LAUNCH, ArgumentError, NotWarmError, RtkError
from rtkernels.runtime import env
from rtkernels.runtime.depends import MISS
from rtkernels.runtime.torch_private import below_versions

Record = Callable[[str, str | None], None]
_warned: set[str] = set()


class _Inside(threading.local):
    handler = False  # True: one runs in this thread, and aten ops that it calls go to torch


_inside = _Inside()


class Override:
    """What the dispatcher calls in the place of a kernel of torch, and whether our kernels run there.

    A registration cannot be taken back while other threads may be dispatching, since the dispatcher frees what they
    execute. So it stays, and ``switch`` says what it does; while it is off every call goes straight to torch's kernel.

    Args:
        row: The overload. It is off at first.
        key: "CUDA" or "CPU".
        native: Torch's own kernel, looked up before it was overridden.
    """

    def __init__(self, row: Overload, key: str, native: Any) -> None:
        self.call, self.switch = _override_of(row.name, row.family, key, native)


def _override_of(name: str, family: str, key: str, native: Any) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the function that the dispatcher calls, and one that switches it: to a row and a record, or off.

    The way of a call that is like one before, or too small, is kept short: while it is off there is no ``find``.
    """
    inside, on_cpu, switching = _inside, key == "CPU", threading.Lock()
    row: Overload | None = None  # None: off
    record: Record | None = None
    torch_kernel, count = _torch_kernel(name, family, native, key), count_of(name, family)
    handler = made_for = find = prepared = calls = None

    def switch(wanted: Overload | None, to: Record | None = None) -> None:
        nonlocal row, record, find, prepared, made_for
        with switching:
            if wanted is not None and wanted.handler is not made_for:
                prepared, made_for = None, wanted.handler
            row, record = wanted, to
            find = None if wanted is None else prepared

    def override(*args: Any, **kwargs: Any) -> Any:
        if find is None and not prepare():
            return torch_kernel(*args, **kwargs)
        result = MISS
        if not on_cpu:
            try:
                result = find(*args, **kwargs)
            except (AttributeError, TypeError):  # a number in the place of a tensor, or switched off just now
                pass
        if result is MISS or type(result) is NotHandled:
            if inside.handler:
                return torch_kernel(*args, **kwargs)
            return handled(args, kwargs) if result is MISS else given_back(result.reason, args, kwargs)
        count.ours += 1
        if (noted := record) is not None:  # once: another thread may switch
            noted(name, None)
        return result

    def given_back(reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count.torch[reason] += 1
        if (noted := record) is not None:
            noted(name, reason)
        return torch_kernel(*args, **kwargs)

    def prepare() -> bool:
        """Import the handler and make ``find``, in the first call: ``enable`` is to be quick. False: switched off."""
        nonlocal handler, find, prepared, calls
        wanted = row
        if wanted is None:
            return False
        from rtkernels.aten import replay

        actual = wanted if wanted.handler is not None else table.row_of(name)
        measured = name if name in table.MIN_ELEMENTS else family
        limits = {measured: 0} if on_cpu else table.MIN_ELEMENTS
        repeats = actual.replays is True or (actual.replays == "cuda" and not on_cpu)
        with switching:
            if row is not wanted:
                return row is not None and handler is not None
            if prepared is None:
                calls = replay.calls_of(actual, key, limits, measured, replays=repeats)
                handler, prepared = actual.handler, calls.find
            find = prepared
        return True

    def handled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside.handler = True
        try:
            with below_versions():  # the dispatcher has counted what the call writes, and results are new
                result = emulated(args, kwargs) if on_cpu else calls.call(handler, args, kwargs)
        except CANNOT_LAUNCH as error:
            reason = _not_launched(name, error)
        except ArgumentError:  # torch raises its own
            reason = "invalid arguments"
        except OverflowError:  # a plan would need more blocks than a grid has
            reason = "too large"
        else:
            if type(result) is not NotHandled:
                count.ours += 1
                if (noted := record) is not None:
                    noted(name, None)
                return result
            reason = result.reason
        finally:
            inside.handler = False
        return given_back(reason, args, kwargs)

    def emulated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from rtkernels.runtime.launch.device import emulating

        features = emulator.active()
        if features is None:
            return _NOT_EMULATING
        with emulating(features):  # which may forget what is known
            try:
                result = prepared(*args, **kwargs)
            except (AttributeError, TypeError):
                result = MISS
            return calls.call(handler, args, kwargs) if result is MISS else result

    return override, switch


CODE_FILE = _override_of.__code__.co_filename  # of the frames of calls
_NOT_EMULATING = NotHandled("on the CPU")


def _torch_kernel(name: str, family: str, native: Any, key: str) -> Callable[..., Any]:
    """Return torch's own kernel as a function of what an override is given.

    Numbers in the place of tensors, which the dispatcher unwraps for Python, are wrapped again as the dispatcher does.
    """
    if key == "CUDA" and name in wrapped.CALLS:
        return wrapped.CALLS[name].function
    if family not in ("ew", "copy"):  # others take no numbers for tensors
        return native
    places: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not places:  # at the first call: schemas take long to look up
            types = [str(argument.type) for argument in table.schema_of(name).arguments]
            places[:] = [i for i, kind in enumerate(types) if kind == "Tensor"] or [len(types)]
        for i in places:
            if i < len(args) and not isinstance(args[i], torch.Tensor):
                return wrapped.with_numbers_as_tensors(native, args, kwargs)
        return native(*args, **kwargs)

    return call


def _not_launched(name: str, error: RtkError) -> str:
    if isinstance(error, NotWarmError):
        return "kernel not loaded while a graph is captured or compiling is off"
    if name not in _warned:
        _warned.add(name)
        env.logger().warning("aten::%s runs as torch has it: %s", name, error)
    return "kernel cannot be launched"
