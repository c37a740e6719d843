"""Noting what a function launches, so that a call like it can be repeated without the function (``aten.replay``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from rtkernels.runtime.layout import may_overlap
from rtkernels.runtime.operator.plan import StepPlan


class Call(NamedTuple):
    """One noted launch, or several that belong together.

    Attributes:
        run: Takes the addresses of `tensors`, 0 for None, and then `numbers`; allocates and launches.
        tensors: What it reads or writes.
        numbers: Its last arguments, the same in every call.
        made: What it returned; the first of `tensors` for one that writes to a tensor it is given.
        overlaps: For these: says of another tensor and that one that they share memory as `run` cannot have it.
    """

    run: Callable[..., Any]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[Any, ...]
    made: Any
    overlaps: Callable[[Tensor, Tensor], bool] | None = None


class _Tape(threading.local):
    calls: list[Call | None] | None = None  # None: nobody listens; a None in it: something that cannot be repeated


tape = _Tape()


def note_primitive(declared: Any, args: tuple[Any, ...], made: Any) -> None:
    """Note a call of a primitive: `declared` finds its plan. It may write to its first tensor, which is `made` then."""
    plan = declared._find(*args)
    if type(plan) is not StepPlan or plan.converted or declared._written not in ([], [declared.names[0]]):
        tape.calls.append(None)
        return
    tensors, numbers = (tuple(args[i] for i in at) for at in (declared._places, declared._number_places))
    if declared._written:
        tape.calls.append(Call(plan.run, tensors, numbers, args[0], may_overlap))
    else:
        tape.calls.append(Call(plan.run, tensors, numbers, made))


def noted(operator: Any, *args: Any) -> Any:
    """Call a declared operator, and note it; one that writes to its first tensor is launched without the dispatcher."""
    made = operator.launch(*args) if operator._written else operator.call(*args)
    if tape.calls is not None:
        note_primitive(operator, args, made)
    return made
