"""The level of batch invariance: how far a row's bits may depend on the rest of a batch.

Level 0 promises nothing, 1 the forward pass, 2 gradients of inputs as well, 3 gradients of weights as well. The level
is one of the things that a call depends on (``depends.py``). A scope belongs to a thread and to the threads in which
autograd runs the backward passes that it starts; the default belongs to the process.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.torch_private import is_dynamo_compiling

MAX_LEVEL = 3
_CHOICE_ROWS = 4096
PROMISES = {1: "the forward pass", 2: "gradients of inputs", 3: "gradients of weights"}
BY_ITSELF = "every micro-batch is summed up by itself"
OF_EXPERTS = "micro-batches do not cut the tokens of an expert at multiples of 128 rows"
_KEY = "rtkernels_batch_invariant"  # of torch's thread-local objects, which autograd passes to its threads


class _State:
    """``highest``: of the default and all scopes of all threads; while it is 0, nobody asks for the level of a thread.

    Dynamo reads and guards it in place of the level: the choices for a higher level are right for a lower one, too.
    """

    __slots__ = ("default", "highest", "scopes")

    def __init__(self) -> None:
        self.default, self.highest = 0, 0
        self.scopes: list[int] = []


state = _State()
_lock = threading.Lock()


def level() -> int:
    """Return the level of this thread."""
    if not state.highest:
        return 0
    if is_dynamo_compiling():
        return state.highest
    if torch._C._is_key_in_tls(_KEY):
        scoped = torch._C._get_obj_in_tls(_KEY)
        if scoped is not None:
            return scoped
    return state.default


# In generated code with ``LEVEL_SCOPE``: the level, and whether it is above 0, which takes half the host time.
LEVEL_CODE = "(invariance_level() if invariance.highest else 0)"
IS_INVARIANT = "(invariance.highest and invariance_level())"
LEVEL_SCOPE: dict[str, Any] = {"invariance": state, "invariance_level": level}


def check_level(value: Any) -> int:
    """Return a level, or raise an ArgumentError."""
    if type(value) is not int or not 0 <= value <= MAX_LEVEL:
        raise ArgumentError(f"level is {value!r}; expected 0 (off), 1 (forward), 2 (and inputs' gradients) or 3 (all)")
    return value


def _changed() -> None:
    state.highest = max(state.default, *state.scopes, 0)


def set_default(value: int) -> None:
    """Set the level of all threads that are in no scope."""
    with _lock:
        state.default = check_level(value)
        _changed()


def enter(value: int) -> int | None:
    """Begin a scope of this thread. Returns the level of the scope around it, which ``leave`` takes."""
    before = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    with _lock:
        state.scopes.append(value)
        _changed()
    torch._C._stash_obj_in_tls(_KEY, value)
    return before


def leave(value: int, before: int | None) -> None:
    """End a scope."""
    torch._C._stash_obj_in_tls(_KEY, before)
    with _lock:
        state.scopes.remove(value)
        _changed()


def starts_from_result() -> bool:
    """Return True if a sum over rows that is added to a result starts from it and adds blocks of 128 rows in order."""
    return state.highest >= 3 and level() >= 3


def refuse_weight_gradient(what: str) -> None:
    """Raise an ArgumentError at level 3 for a sum over rows whose bits depend on how a batch is cut into parts."""
    if level() >= 3:
        refuse(what, BY_ITSELF)


def choice_rows(rows: int) -> int:
    """Return the number of rows by which a plan chooses between kernels: one for all, with batch invariance."""
    return _CHOICE_ROWS if level() else rows


def refuse(what: str, why: str) -> None:
    """Raise an ArgumentError for a computation that cannot be batch-invariant."""
    raise ArgumentError(
        f"{what} is not batch-invariant: {why}; expected another call inside of batch_invariant({level()}), or level 0"
    )
