"""What the dispatcher calls for an overload that is taken: its handler, or a repetition of what that launched before;
whatever the handler does not take goes to torch's own kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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


def override_of(row: Overload, key: str, native: Any, record: Record | None) -> Callable[..., Any]:
    """Return what the dispatcher calls in the place of a kernel of torch.

    The way of a call that is like one before, or too small, is kept short.

    Args:
        row: The overload.
        key: "CUDA" or "CPU".
        native: Torch's own kernel, looked up before it was overridden.
        record: Gets the overload, and why torch's kernel ran or None.
    """
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
                values[i] = torch.scalar_tensor(args[i], dtype=torch.result_type(args[i], args[i]), device="cpu")
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
    return torch.scalar_tensor(number, dtype=dtype, device="cpu")


_KINDS = {bool: 0, int: 1, float: 2, complex: 3}


def _not_launched(name: str, error: RtkError) -> str:
    if isinstance(error, NotWarmError):
        return "kernel not loaded while a graph is captured or compiling is off"
    if name not in _warned:
        _warned.add(name)
        env.logger().warning("aten::%s runs as torch has it: %s", name, error)
    return "kernel cannot be launched"
