"""Whether memory that is written may overlap memory that is read: decided here and nowhere else.

While one thread of a kernel reads an element, another one may write it. A result may therefore alias an input only if
every thread reads the elements that it overwrites first, and no others: the same memory with the same layout, for
arguments that an operator or a function names (``over``). All other overlaps are refused. Operators of ``declared.py``
compare addresses in every call (their plans know shapes and strides); ``out=`` goes through ``refuse_shared``. Tensors
that are traced have no addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import extent, is_dense, may_overlap, sharing
from rtkernels.runtime.torch_private import has_address


def refuse_shared(
    name: str, written: Tensor, others: Iterable[tuple[str, Tensor | None]], over: Collection[str] = ()
) -> None:
    """Raise an ArgumentError if a tensor that will be written shares memory with others.

    Args:
        name: Name of the tensor.
        written: The tensor.
        others: All other tensors that the call reads or writes, with their names.
        over: Names of tensors that it may alias: the same memory, with the same layout and dtype.
    """
    if written.is_meta or not has_address(written):
        return
    for other, t in others:
        if t is None or t.is_meta or t.device != written.device or (other in over and _is_same(written, t)):
            continue
        if may_overlap(written, t):
            raise shared_error(name, other, over)


def shared_error(name: str, other: str, over: Collection[str]) -> ArgumentError:
    """Return the error for a call in which two tensors share memory."""
    remedy = f"its own, or {' or '.join(over)} itself" if over else "its own"
    return ArgumentError(f"{name} shares memory with {other}; expected {remedy}")


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.data_ptr() == b.data_ptr() and _alike((a.dtype, a.shape, a.stride()), (b.dtype, b.shape, b.stride()))
    )


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Return True if equal addresses mean equal elements: the same layout, or dense tensors of the same size."""
    if a[0] != b[0]:
        return False
    same_size = math.prod(a[1]) == math.prod(b[1])
    return (tuple(a[1]), tuple(a[2])) == (tuple(b[1]), tuple(b[2])) or (same_size and is_dense(a) and is_dense(b))


def refuse_shared_lists(lists: Sequence[tuple[str, Sequence[Tensor], bool]]) -> None:
    """Raise an ArgumentError if a tensor of a list that is written shares memory with another tensor.

    Tensors with the same index in two lists may be the same memory.

    Args:
        lists: For each list its name, its tensors, and whether they are written.
    """
    flat = [t for _, tensors, _ in lists for t in tensors]
    if not flat or not has_address(flat[0]):
        return
    starts = numpy.array([t.data_ptr() for t in flat], numpy.int64)
    ends = starts + numpy.array([t.nbytes if t.is_contiguous() else _reach(t) for t in flat], numpy.int64)
    order = numpy.argsort(starts, kind="stable")
    reached = numpy.maximum.accumulate(ends[order])[:-1]
    if not (reached > starts[order][1:]).any():
        return  # nearly always
    where = [(number, i) for number, (_, tensors, _) in enumerate(lists) for i in range(len(tensors))]
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


def _reach(t: Tensor) -> int:
    first, last = extent(t) if t.numel() else (0, 0)
    return last - first


class Guard(NamedTuple):
    """A comparison of two addresses that a plan makes in every call: an argument that is written, and another one.

    Attributes:
        written: Name of the argument that is written.
        other: Name of the other argument.
        low: They can overlap only if the distance from `written` to `other` in bytes is between `low` and `high`.
        high: See `low`.
        share: Decides whether they overlap at such a distance.
        may_be: Equal addresses are allowed.
        over: Names of all arguments that `written` may be, for the error.
    """

    written: str
    other: str
    low: int
    high: int
    share: Callable[[int], bool]
    may_be: bool
    over: tuple[str, ...]


def guards_of(arguments: Sequence[Any], metas: dict[str, Any]) -> list[Guard]:
    """Return the comparisons that a plan of an operator makes.

    Args:
        arguments: Arguments of the operator (``kinds.Argument``).
        metas: Metadata of its tensors by name; None for absent ones.
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
            found.append(Guard(argument.name, other.name, *limits, may_be, argument.over))
    return found


def guard_lines(guards: Sequence[Guard], scope: dict[str, Any]) -> list[str]:
    """Return lines that check the addresses ``p_<argument>``; adds the objects they refer to to `scope`."""
    lines, scope["shared_error"] = [], shared_error
    for i, guard in enumerate(guards):
        scope[f"share_{i}"] = guard.share
        distance = f"p_{guard.other} - p_{guard.written}"
        same = f"p_{guard.other} != p_{guard.written} and " if guard.may_be else ""
        error = f"shared_error({guard.written!r}, {guard.other!r}, {guard.over!r})"
        lines.append(f"if {guard.low} < {distance} < {guard.high} and {same}share_{i}({distance}): raise {error}")
    return lines
