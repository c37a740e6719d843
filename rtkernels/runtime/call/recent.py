"""Recent calls of a function: the third call of a kind costs no more host time than its launches.

The second call with one key (``depends.py``) is recorded (``trace.py``), and a function is written that compares
arguments, allocates and launches (``codegen.py``). It is tried again on the next call and on calls whose first tensors
have the same shapes, because layers of different shapes alternate; any other call is found by its key. Calls that need
gradients, tensor subclasses, dispatch modes, transforms and compilation go to the function itself, and so does what
cannot be recorded. Aten overrides keep theirs in the same table (``aten.replay``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rtkernels import emulator
from rtkernels.runtime.call.codegen import GuardedWriter
from rtkernels.runtime.call.trace import Arguments, DispatchTrace
from rtkernels.runtime.depends import MISS, call_key
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.torch_private import functorch_transform, jit_tracing_state

_LIMIT = 1024  # calls that a public function remembers
_FIRST_TRIED = 4  # of those with the same shapes, compared one by one before a look-up by key
ATTEMPTS = 4  # at recording calls of one key: the comparison in C++ and replays see more than a key holds


class Known:
    """What is known of calls with one key.

    Attributes:
        attempts: How often such a call was recorded.
        replay: Does it again.
        matches: The comparison of its tensors in C++, where the replay does not make it itself.
        why_not: Why there is no replay.
    """

    __slots__ = ("attempts", "matches", "replay", "why_not")

    def __init__(self) -> None:
        self.attempts, self.replay, self.matches = 0, None, None
        self.why_not: str | None = None


class Calls:
    """What is known of the calls of one function, by key; forgotten when plans are.

    Args:
        limit: How many keys are kept. A program with ever-changing shapes starts over instead of growing.
    """

    def __init__(self, limit: int) -> None:
        self.known: dict[Any, Known] = {}
        self._limit = limit
        Plans.replays.append(self.forget)

    def forget(self) -> None:
        """Forget all calls: plans may have changed."""
        self.known.clear()

    def add(self, key: Any) -> Known:
        """Return what is known of a new key: nothing."""
        if len(self.known) >= self._limit:
            self.known.clear()
        known = self.known[key] = Known()
        return known


def miss(*_: Any) -> Any:
    """Stand in for a replay when there is none."""
    return MISS


class Recent(Calls):
    """Finds the replay of a call of one function, or records one.

    Args:
        name: The function's.
        scope: Globals of the function that users call: ``_last`` is tried first, ``_call`` is the function itself with
            ``out=`` and foreign arrays.
        names: Its arguments.
        shaped: Those of them whose shapes tell most calls apart: two at most.
        over: Those that `out` may be.
    """

    def __init__(
        self, name: str, scope: dict[str, Any], names: list[str], shaped: list[str], over: tuple[str, ...]
    ) -> None:
        self.name, self._scope, self._names, self._over = name, scope, names, over
        self._first, self._second = (names.index((shaped or names)[i]) for i in (0, -1))
        self._first_tried: dict[Any, tuple[Callable[..., Any], ...]] = {}
        super().__init__(_LIMIT)

    def forget(self) -> None:
        """Forget all calls: plans may have changed."""
        super().forget()
        self._first_tried.clear()
        self._scope["_last"] = miss

    def find(self, *values: Any) -> Any:
        """Make a call that is not like the last one."""
        last = self._scope["_last"]
        try:
            shapes = values[self._first].shape, values[self._second].shape
            first_tried = self._first_tried.get(shapes, ())
        except (AttributeError, TypeError):  # no tensors, or sizes that are symbols
            shapes, first_tried = None, ()
        for replay in first_tried:
            if replay is not last:
                result = replay(*values)
                if result is not MISS:
                    self._scope["_last"] = replay
                    return result
        key = self._key(values)
        if key is None:
            return self._scope["_call"](*values)
        if key[0] < 0:
            return self._emulated(values)
        return self._found(key, values, shapes)

    def _found(self, key: tuple[Any, ...], values: tuple[Any, ...], shapes: Any = None) -> Any:
        known = self.known.get(key)
        if known is None:  # shapes that come once are not worth a trace
            result = self._scope["_call"](*values)
            self.add(key)
            return result
        if known.replay is not None:
            result = known.replay(*values)
            if result is not MISS:
                self._scope["_last"] = known.replay
                self._try_first(known.replay, shapes)
                return result
        if known.attempts >= ATTEMPTS:
            return self._scope["_call"](*values)
        return self._recorded(known, values)

    def _try_first(self, replay: Callable[..., Any], shapes: Any) -> None:
        if len(self._first_tried) >= _LIMIT:
            self._first_tried.clear()
        others = self._first_tried.get(shapes, ())
        if shapes is not None and replay not in others:
            self._first_tried[shapes] = replay, *others[: _FIRST_TRIED - 1]

    def _key(self, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the key of a call, None for one that is not recorded."""
        if functorch_transform() is not None or jit_tracing_state() is not None:
            return None
        key = call_key(values)
        return None if key is None or (key[0] < 0 and emulator.active() is None) else key

    def _recorded(self, known: Known, values: tuple[Any, ...]) -> Any:
        arguments = Arguments(dict(zip(self._names, values, strict=True)))
        known.attempts += 1
        if any(t.is_neg() or t.is_conj() or not t.numel() for t in arguments.tensors.values()):
            return self._scope["_call"](*values)
        trace = DispatchTrace(arguments.tensors, over=self._over)
        with trace:
            result = self._scope["_call"](*values)
        known.replay = GuardedWriter(self.name, arguments, trace).replay(result)
        if known.replay is None:
            known.attempts, known.why_not = ATTEMPTS, trace.refused
        return result

    def _emulated(self, values: tuple[Any, ...]) -> Any:
        """Do the same on the CPU: in the emulator addresses are objects, and operators begin and end a recording."""
        with emulator.lock:  # plans are built while a call is recorded, too: for the target of this thread
            emulate_features(emulator.active())  # which may forget what is known
            known = self.known.get(key := self._key(values))
            if known is not None and known.replay is not None:
                with emulator.recording():
                    result = known.replay(*values)
                if result is not MISS:
                    return result
                known.replay = None
            return self._found(key, values)
