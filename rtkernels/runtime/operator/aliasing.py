"""Whether memory that is written may be that of something that is read: the one place that decides it.

A kernel reads an element while another thread writes it, so that a result may lie over an input only where every
thread reads what it overwrites first, and nothing else: exactly the same memory, seen alike, of arguments that an
operator or a function names (``over``). Everything else is refused, by addresses: operators of ``declared.py`` compare
them in every call (their plans know shapes and strides), ``out=`` of public functions goes through ``refuse_shared``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import extent, is_dense, may_overlap, sharing


def refuse_shared(
    name: str, written: Tensor, others: Iterable[tuple[str, Tensor | None]], over: Collection[str] = ()
) -> None:
    """Raise an ArgumentError if a tensor that is to be written shares memory with others.

    Args:
        name: Of the tensor.
        written: The tensor.
        others: Tensors that the call reads or writes besides, by name.
        over: Names of those that it may be: the same memory, with the same shape, strides and dtype.
    """
    if written.is_meta:
        return
    for other, t in others:
        if t is None or t.is_meta or t.device != written.device or (other in over and _is_same(written, t)):
            continue
        if may_overlap(written, t):
            raise shared_error(name, other, over)


def shared_error(name: str, other: str, over: Collection[str]) -> ArgumentError:
    """Return the error of a call in which two tensors share memory."""
    remedy = f"its own, or {' or '.join(over)} itself" if over else "its own"
    return ArgumentError(f"{name} shares memory with {other}; expected {remedy}")


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.data_ptr() == b.data_ptr() and _alike((a.dtype, a.shape, a.stride()), (b.dtype, b.shape, b.stride()))
    )


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Return True if elements of the same number lie at the same place: one layout, or dense ones of one size."""
    if a[0] != b[0]:
        return False
    same_size = math.prod(a[1]) == math.prod(b[1])
    return (tuple(a[1]), tuple(a[2])) == (tuple(b[1]), tuple(b[2])) or (same_size and is_dense(a) and is_dense(b))


def refuse_shared_lists(lists: Sequence[tuple[str, Sequence[Tensor], bool]]) -> None:
    """Raise an ArgumentError if a tensor of a list that is written shares memory with another one.

    Tensors of the same number in two lists may be the same memory.

    Args:
        lists: Of each, its name, its tensors, and whether they are written.
    """
    where = [(number, i) for number, (_, tensors, _) in enumerate(lists) for i in range(len(tensors))]
    flat = [t for _, tensors, _ in lists for t in tensors]
    starts = numpy.array([t.data_ptr() for t in flat], numpy.int64)
    ends = starts + numpy.array([extent(t)[1] - extent(t)[0] if t.numel() else 0 for t in flat], numpy.int64)
    order = numpy.argsort(starts, kind="stable")
    reached = numpy.maximum.accumulate(ends[order])[:-1]
    if not (reached > starts[order][1:]).any():
        return  # nearly always
    order = [int(i) for i in order if starts[i] < ends[i]]
    for place, i in enumerate(order):
        for j in order[place + 1 :]:
            if starts[j] >= ends[i]:
                break
            (a, m), (b, n) = where[i], where[j]
            same = a != b and m == n and (starts[i], ends[i]) == (starts[j], ends[j])
            if not same and (lists[a][2] or lists[b][2]) and may_overlap(flat[i], flat[j]):
                first, second = (f"{lists[x][0]}[{y}]" for x, y in sorted(((a, m), (b, n))))
                raise shared_error(second, first, ())


class Guard(NamedTuple):
    """What a plan compares in every call: the addresses of something that is written and of something else.

    Attributes:
        written: Name of an argument of the operator.
        other: Name of another one.
        low: The distance from `written` to `other` in bytes is not between these two numbers if they are apart.
        high: See `low`.
        share: Looks at a distance between them more closely.
        may_be: The same address will do.
        refuse: Raises the error.
    """

    written: str
    other: str
    low: int
    high: int
    share: Callable[[int], bool]
    may_be: bool
    refuse: Callable[[], None]


def guards_of(arguments: Sequence[Any], metas: dict[str, Any]) -> list[Guard]:
    """Return what plans of an operator compare.

    Args:
        arguments: The operator's (``kinds.Argument``).
        metas: Of its tensors, by name; None for absent ones.
    """
    found, seen = [], set()
    for argument in arguments:
        if not argument.written or (meta := metas[argument.name]) is None:
            continue
        for other in arguments:
            if other is argument or (their := metas[other.name]) is None or (other.name, argument.name) in seen:
                continue
            seen.add((argument.name, other.name))
            limits = sharing(
                (meta.shape, meta.stride, meta.dtype.itemsize), (their.shape, their.stride, their.dtype.itemsize)
            )
            if limits is None:
                continue
            may_be = other.name in argument.over and _alike(meta[:3], their[:3])
            found.append(Guard(argument.name, other.name, *limits, may_be, _refusal(argument, other)))
    return found


def _refusal(argument: Any, other: Any) -> Callable[[], None]:
    def refuse() -> None:
        raise shared_error(argument.name, other.name, argument.over)

    return refuse


def guard_lines(guards: Sequence[Guard], scope: dict[str, Any]) -> list[str]:
    """Return lines that raise for addresses ``p_<argument>``; `scope` gets what they refer to."""
    lines = []
    for i, guard in enumerate(guards):
        scope[f"share_{i}"], scope[f"refuse_{i}"] = guard.share, guard.refuse
        distance = f"p_{guard.other} - p_{guard.written}"
        same = f"p_{guard.other} != p_{guard.written} and " if guard.may_be else ""
        lines.append(f"if {guard.low} < {distance} < {guard.high} and {same}share_{i}({distance}): refuse_{i}()")
    return lines
