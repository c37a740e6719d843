"""What the lines of a noted call (``noting.py``) do with memory, changed so that a function written of them does less.

Results go to where a copy would bring them, lines whose results nobody uses are left out, memory has the layout it is
returned with, and what lies between launches is allocated as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rtkernels.runtime.operator.noting import Line, Notes, Root, View
from rtkernels.runtime.operator.plan import layout_of

_PACKED_BYTES = 8 << 20  # of memory between launches that is allocated as one, though some of it could be freed earlier
_ALIGNMENT = 256  # of each part of it

Seen = dict[int, set[View]]  # by the id of a root


def results_of(notes: Notes, line: Line) -> list[Root]:
    """Return what a line makes, in order."""
    return sorted((root for root in notes.roots() if root.line is line), key=lambda root: root.part or 0)


def write_in_place(notes: Notes, returned: list[View]) -> dict[int, View]:
    """Let plans write their results to where nothing but a copy brings them; return these places by root."""
    places: dict[int, View] = {}
    for copy in [line for line in notes.lines if line.function is torch.ops.aten.copy_.default]:
        if len(copy.given) != 2 or copy.keywords or not all(map(_is_view, copy.given)):
            continue
        target, source = copy.given
        root = source.root
        same = target.dtype == source.dtype and target.shape == source.shape and _alike(target, source)
        if not same or not _is_aligned(notes, target) or not _is_uninitialised(root) or not _is_all(source, root):
            continue
        users = [line for line in notes.lines if line is not copy and (line is root.line or root in _roots_of(line))]
        writers = [line for line in users if line is not root.line or line.plan is not None]
        if not writers or any(line.plan is None or not line.plan.is_straight for line in writers):
            continue
        places_of, end = [_place(notes, line) for line in users], _place(notes, copy)
        between = notes.lines[min(places_of) : end]
        if root in [view.root for view in returned] or max(places_of) > end:
            continue
        if any(target.root in _roots_of(line) or target.root.line is line for line in between):
            continue
        if target.root.argument:  # which may lie anywhere
            read = [view for line in between for view in _views_of(line) if view.root.argument]
            notes.apart += [(target, view) for view in dict.fromkeys(read)]
        places[id(root)] = target
        for line in writers:
            _replace(notes, line, line._replace(written=(*line.written, target), changes=True))
        notes.lines[:] = [line for line in notes.lines if line is not copy and (line.plan or line is not root.line)]
    return places


def _is_aligned(notes: Notes, view: View) -> bool:
    """Return True if a view begins where kernels take it that results do, at a multiple of 16 bytes."""
    begin = notes.arguments[view.root.name].data_ptr() & 15 if view.root.argument else 0
    return not (begin + view.first) % 16


def _is_uninitialised(root: Root) -> bool:
    """Return True for memory that plans fill: one of their results, or what was allocated for them."""
    line = root.line
    if line is None or line.function is not None:
        return False
    if line.plan is None:
        return not line.keywords
    name = line.plan.results[root.part or 0]
    return line.plan.is_straight and line.plan.is_asked_for(name) and line.plan.memory()[name].is_plain


def drop_unused(notes: Notes, returned: list[View]) -> None:
    """Leave out lines whose results nobody uses: a function may work out more than this call asks for."""
    used, kept = {id(view.root) for view in returned}, []
    made: dict[int, list[Root]] = {}
    for root in notes.roots():
        made.setdefault(id(root.line), []).append(root)
    for line in reversed(notes.lines):
        if line.changes or any(id(root) in used for root in made.get(id(line), [])):
            kept.insert(0, line)
            used |= {id(root) for root in _roots_of(line)}
    notes.lines[:] = kept


def seen_views(notes: Notes, returned: list[View]) -> Seen:
    """Return what is seen of memory as tensors, by root: what is returned or given to functions of torch."""
    seen: Seen = {}
    for view in returned:
        seen.setdefault(id(view.root), set()).add(view)
    for line in notes.lines:
        if line.function is not None or (line.plan is not None and not line.plan.is_straight):
            for view in _views_of(line):
                seen.setdefault(id(view.root), set()).add(view)
    return seen


def reshape_memory(notes: Notes, seen: Seen) -> None:
    """Let memory be allocated as it is returned, where only its address is used besides: views take host time."""
    remade: dict[int, dict[int, View]] = {}
    for views in seen.values():
        (view, *others) = views
        root = view.root
        if others or root.argument or view.is_root or root.line.function is not None or not _is_all(view, root):
            continue
        if root.line.plan is not None:
            if not root.line.plan.is_allocated(root.part or 0):
                continue
            remade.setdefault(_place(notes, root.line), {})[root.part or 0] = view
        root.shape, root.strides, root.dtype = view.shape, view.strides, view.dtype
    for i, parts in remade.items():
        line = notes.lines[i]
        plan = line.plan.with_layouts({part: (v.shape, v.strides, v.dtype) for part, v in parts.items()})
        _replace(notes, line, line._replace(plan=plan))


def packed_memory(notes: Notes, seen: Seen, places: dict[int, View]) -> tuple[dict[Any, int], int]:
    """Return where memory between launches lies in one allocation, if that is better, and the size of that.

    Args:
        notes: Of the call.
        seen: What must be a tensor of its own.
        places: What ``write_in_place`` returned.

    Returns:
        First bytes, by the id of a root, or by the number of a line and the name of its scratch.
    """
    sizes: dict[Any, int] = {}
    for i, line in enumerate(notes.lines):
        made = results_of(notes, line)
        if line.plan is not None and line.plan.is_straight:
            results = dict(zip(line.plan.results, made, strict=True))
            for name, memory in line.plan.memory().items():
                root = results.get(name)
                used = root is not None and (id(root) in seen or id(root) in places)
                if not used and line.plan.is_asked_for(name) and memory.is_plain:
                    sizes[(i, name) if root is None else id(root)] = _span_of(*layout_of(memory))
        elif line.plan is None and line.function is None and id(made[0]) not in seen and not line.keywords:
            sizes[id(made[0])] = span(made[0])
    sizes = {where: -(-size // _ALIGNMENT) * _ALIGNMENT for where, size in sizes.items()}
    total = sum(sizes.values())
    if len(sizes) < 2 or total > _PACKED_BYTES:
        return {}, 0
    packed: dict[Any, int] = {}
    for where in sizes:
        packed[where] = sum(sizes[other] for other in packed)
    return packed, total


def _place(notes: Notes, line: Line) -> int:
    return next(i for i, other in enumerate(notes.lines) if other is line)


def _replace(notes: Notes, old: Line, new: Line) -> None:
    notes.lines[_place(notes, old)] = new
    for root in notes.roots():
        root.line = new if root.line is old else root.line


def _is_all(view: View, root: Root) -> bool:
    """Return True if a view has all bytes of a root, in whatever order."""
    return not view.first and span(view) == span(root) and size(view) == size(root)


def _is_view(value: Any) -> bool:
    return isinstance(value, View)


def _views_of(line: Line) -> list[View]:
    """Return what a line is given and what it overwrites."""
    leaves = torch.utils._pytree.tree_leaves((line.given, line.keywords), is_leaf=_is_view)
    return [*filter(_is_view, leaves), *line.written]


def _roots_of(line: Line) -> list[Root]:
    return [view.root for view in _views_of(line)]


def _alike(a: View, b: View) -> bool:
    """Return True if views of one shape have the same strides."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))


def size(t: View | Root) -> int:
    """Return the bytes of its elements."""
    return math.prod(t.shape) * t.dtype.itemsize


def span(t: View | Root) -> int:
    """Return how many bytes lie between the first element and the end of the last one."""
    return _span_of(t.shape, t.strides, t.dtype)


def _span_of(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    return (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * dtype.itemsize
