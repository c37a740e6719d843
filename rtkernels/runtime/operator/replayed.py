"""``@replayed``: a public function whose repeated calls cost no more host time than their launches.

The second call with the same metadata of tensors and the same other arguments is noted (``noting.py``), and a function
is written that compares arguments, allocates and launches. A call like one of the last ones costs a comparison in C++
for each of them; one like another one before costs a look-up by metadata. Calls that need gradients, tensor
subclasses, dispatch modes, transforms, compilation and ``out=`` by ``into`` go to the function itself, and so does what
cannot be noted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from rtkernels import emulator
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.into import calls_under_way
from rtkernels.runtime.operator.noting import MAX_PARTS, Arguments, Notes
from rtkernels.runtime.operator.written import written_code
from rtkernels.runtime.operator.written_replay import MISS, written_call
from rtkernels.runtime.torch_private import (
    TENSOR_TYPES,
    dispatch_modes,
    forward_ad,
    functorch_transform,
    is_dynamo_compiling,
    jit_tracing_state,
)

F = TypeVar("F", bound=Callable[..., Any])
_LIMIT = 1024  # calls that a function knows
_AT_HAND = 4  # of them, which are compared one by one: layers of different shapes alternate
_ATTEMPTS = 4  # to note calls of one key: what C++ compares is more than a key has
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


class _Known:
    """What is known of calls with one key."""

    __slots__ = ("attempts", "replay", "why_not")

    def __init__(self) -> None:
        self.attempts, self.replay = 0, None
        self.why_not: str | None = None


def replayed(function: F) -> F:
    """Return a function like this one, whose calls are replayed.

    Args:
        function: What it computes follows from metadata, from its other arguments and from what the dispatcher sees.
    """
    parameters = inspect.signature(function).parameters
    listed = []
    for name, p in parameters.items():
        if p.kind is p.KEYWORD_ONLY and "*" not in listed:
            listed.append("*")
        listed.append(name)
    by_place = [name if p.kind is not p.KEYWORD_ONLY else f"{name}={name}" for name, p in parameters.items()]
    names = ", ".join(parameters)
    source = f"""
def {function.__name__}({", ".join(listed)}):
    if not is_dynamo_compiling() and forward_ad._current_level < 0 and not dispatch_modes() and not calls_under_way:
        made = last({names})
        if made is not MISS:
            return made
        return find({names})
    return function({", ".join(by_place)})

def call({names}):
    return function({", ".join(by_place)})
"""
    scope: dict[str, Any] = {  # without a __name__: Dynamo would import it
        "MISS": MISS,
        "function": function,
        "last": _miss,
        "find": lambda *values: finder(values),
        "is_dynamo_compiling": is_dynamo_compiling,
        "forward_ad": forward_ad,
        "dispatch_modes": dispatch_modes,
        "calls_under_way": calls_under_way,
    }
    exec(written_code(source, f"<rtkernels replayed {function.__name__}>"), scope)
    finder = _Finder(function.__name__, scope, [*parameters], by_into=_puts_into(function))
    made = functools.wraps(function)(scope[function.__name__])
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.replays = finder
    return made


def _puts_into(function: Callable[..., Any]) -> bool:
    """Return True for a function that leaves its argument `out` to ``into``."""
    return not {"into", "redirected"}.isdisjoint(function.__code__.co_names)


def _miss(*_: Any) -> Any:
    return MISS


def _add_keys(key: list[Any], values: Iterable[Any], grads: bool) -> bool:
    """Add to a key what a call depends on; return False if it cannot be noted."""
    for value in values:
        kind = type(value)
        if kind in TENSOR_TYPES:
            if value.layout is not torch.strided or value.is_meta or (value.requires_grad and grads):
                return False
            device = key[0] = value.get_device()
            key.append((value.dtype, value.shape, value.stride(), device, value.data_ptr() & 15))
        elif kind in _PLAIN:
            key.append((kind, value))
        elif isinstance(value, (tuple, list)) and len(value) <= MAX_PARTS:
            key.append((kind, len(value)))
            if not _add_keys(key, value, grads):
                return False
        else:
            return False
    return True


class _Finder:
    """Finds what is known of calls of one function, and makes it known.

    Args:
        name: Of the function.
        scope: What the function that users call knows: ``last`` is tried first, ``call`` is the function itself.
        names: Of its arguments.
        by_into: ``into`` sees to its argument `out`, and knows itself where results go.
    """

    def __init__(self, name: str, scope: dict[str, Any], names: list[str], *, by_into: bool) -> None:
        self.name, self._scope, self._names = name, scope, names
        self._out = names.index("out") if by_into else None
        self.known: dict[Any, _Known] = {}
        self._at_hand: tuple[Callable[..., Any], ...] = ()
        Plans.replays.append(self.forget)

    def forget(self) -> None:
        """Forget all calls: plans may have changed."""
        self.known.clear()
        self._at_hand = ()
        self._scope["last"] = _miss

    def __call__(self, values: tuple[Any, ...]) -> Any:
        last = self._scope["last"]
        for replay in self._at_hand:
            if replay is not last:
                made = replay(*values)
                if made is not MISS:
                    self._scope["last"] = replay
                    return made
        key = self._key(values)
        if key is None:
            return self._scope["call"](*values)
        if key[0] < 0:
            return self._emulated(values)
        return self._found(key, values)

    def _found(self, key: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        known = self.known.get(key)
        if known is None:  # shapes that come one time only are not worth notes
            made = self._scope["call"](*values)
            if len(self.known) >= _LIMIT:
                self.known.clear()
            self.known[key] = _Known()
            return made
        if known.replay is not None:
            made = known.replay(*values)
            if made is not MISS:
                self._scope["last"] = known.replay
                if known.replay not in self._at_hand:
                    self._at_hand = known.replay, *self._at_hand[: _AT_HAND - 1]
                return made
        if known.attempts >= _ATTEMPTS:
            return self._scope["call"](*values)
        return self._noted(known, values)

    def _key(self, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return what the notes of a call are found by, its device first; None for a call that is not to be noted."""
        if self._out is not None and values[self._out] is not None:
            return None
        if functorch_transform() is not None or jit_tracing_state() is not None:
            return None
        key: list[Any] = [None]
        if not _add_keys(key, values, torch.is_grad_enabled()) or key[0] is None:
            return None
        return None if key[0] < 0 and emulator.active() is None else tuple(key)

    def _noted(self, known: _Known, values: tuple[Any, ...]) -> Any:
        arguments = Arguments(dict(zip(self._names, values, strict=True)))
        known.attempts += 1
        if any(t.is_neg() or t.is_conj() or not t.numel() for t in arguments.tensors.values()):
            return self._scope["call"](*values)
        notes = Notes(arguments.tensors)
        with notes:
            result = self._scope["call"](*values)
        known.replay = written_call(self.name, arguments, notes, result)
        if known.replay is None:
            known.attempts, known.why_not = _ATTEMPTS, notes.refused
        return result

    def _emulated(self, values: tuple[Any, ...]) -> Any:
        """Do the same on the CPU: in the emulator addresses are objects, and operators begin and end a recording."""
        with emulator.lock:
            emulate_features(emulator.active())  # which may forget what is known
            known = self.known.get(key := self._key(values))
            if known is not None and known.replay is not None:
                with emulator.recording():
                    made = known.replay(*values)
                if made is not MISS:
                    return made
                known.replay = None
        return self._found(key, values)
