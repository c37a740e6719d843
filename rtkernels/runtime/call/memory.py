"""Where the memory of a trace comes from: new, kept from the last call, or the caller's (``out=``).

A trace is changed here so that its replay does less: results are written where a copy would move them, records whose
results nobody uses are dropped, memory gets the layout in which it is returned, and scratch becomes one allocation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from rtkernels.runtime.call.trace import Record, Root, Trace, View
from rtkernels.runtime.launch.memory import allocator, current_stream, is_capturing
from rtkernels.runtime.layout import is_dense
from rtkernels.runtime.operator.plan import layout_of

_PACKED_BYTES = 8 << 20  # of scratch that is one allocation, though some of it could be freed earlier
_ALIGNMENT = 256  # of each part of it

Seen = dict[int, set[View]]  # by the id of a root


class Kept:
    """Scratch of a replay with ``out=``, kept for each thread and stream; a captured graph gets its own.

    Args:
        device: CUDA ordinal, or -1.
        size: Bytes.
    """

    def __init__(self, device: int, size: int) -> None:
        self._device, self._layout = device, ((size,), (1,), torch.uint8)
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self) -> torch.Tensor:
        """Return the memory."""
        stream = 0
        if self._device >= 0:
            if is_capturing():
                return allocator(self._device)(*self._layout)
            stream = current_stream(self._device)
        found = self._kept.get((get_ident(), stream))
        if found is None:
            found = self._kept[get_ident(), stream] = allocator(self._device)(*self._layout)
        return found


def results_of(trace: Trace, record: Record) -> list[Root]:
    """Return the results of a record, in order."""
    return sorted((root for root in trace.roots() if root.record is record), key=lambda root: root.part or 0)


def write_in_place(trace: Trace, returned: list[View]) -> dict[int, View]:
    """Let plans write results where a copy would move them; return these places by root."""
    places: dict[int, View] = {}
    for copy in [record for record in trace.records if record.function is torch.ops.aten.copy_.default]:
        if len(copy.given) != 2 or copy.keywords or not all(map(_is_view, copy.given)):
            continue
        target, source = copy.given
        root = source.root
        same = target.dtype == source.dtype and target.shape == source.shape and _alike(target, source)
        if not same or not _is_aligned(trace, target) or not _is_uninitialised(root) or not _is_all(source, root):
            continue
        users = [
            record
            for record in trace.records
            if record is not copy and (record is root.record or root in _roots_of(record))
        ]
        writers = [record for record in users if record is not root.record or record.plan is not None]
        if not writers or any(record.plan is None or not record.plan.is_straight for record in writers):
            continue
        places_of, end = [_place(trace, record) for record in users], _place(trace, copy)
        between = trace.records[min(places_of) : end]
        if root in [view.root for view in returned] or max(places_of) > end:
            continue
        if any(_is_in_use(trace, target, record, writers) for record in between):
            continue
        if target.root.argument:  # which may lie anywhere
            read = [view for record in between for view in _views_of(record) if view.root.argument]
            trace.apart += [(target, view) for view in dict.fromkeys(read) if view.root is not target.root]
        places[id(root)] = target
        for record in writers:
            _replace(trace, record, record._replace(written=(*record.written, target), changes=True))
        trace.records[:] = [
            record for record in trace.records if record is not copy and (record.plan or record is not root.record)
        ]
    return places


def _is_in_use(trace: Trace, target: View, record: Record, writers: list[Record]) -> bool:
    """Return True if a record needs the memory that a copy behind it would overwrite.

    The only writer may read that memory itself where the function says that results may be written over an argument:
    its threads read what they overwrite first, and nothing clears it before.
    """
    views = [view for view in _views_of(record) if view.root is target.root]
    if not views and target.root.record is not record:
        return False
    alike = all(_is_same(view, target) for view in views)
    plain = all(memory.is_plain for memory in record.plan.memory().values()) if record.plan is not None else False
    return not (alike and plain and record is writers[0] and len(writers) == 1 and target.root.name in trace.over)


def _is_same(a: View, b: View) -> bool:
    """Return True if elements of the same number lie at the same place."""
    if (a.first, a.dtype) != (b.first, b.dtype):
        return False
    if a.shape == b.shape:
        return _alike(a, b)
    return size(a) == size(b) and all(is_dense((v.dtype, v.shape, v.strides)) for v in (a, b))


def _is_aligned(trace: Trace, view: View) -> bool:
    """Return True if a view begins at a multiple of 16 bytes, as kernels expect of results."""
    begin = trace.arguments[view.root.name].data_ptr() & 15 if view.root.argument else 0
    return not (begin + view.first) % 16


def _is_uninitialised(root: Root) -> bool:
    """Return True for memory that plans fill or clear: a result of theirs, or an allocation."""
    record = root.record
    if record is None or record.function is not None:
        return False
    if record.plan is None:
        return not record.keywords
    name = record.plan.results[root.part or 0]
    return record.plan.is_straight and record.plan.is_asked_for(name) and 0 not in record.plan.memory()[name].shape


def drop_unused(trace: Trace, returned: list[View]) -> None:
    """Drop records whose results nobody uses: a function may compute more than this call needs."""
    used, kept = {id(view.root) for view in returned}, []
    results: dict[int, list[Root]] = {}
    for root in trace.roots():
        results.setdefault(id(root.record), []).append(root)
    for record in reversed(trace.records):
        if record.changes or any(id(root) in used for root in results.get(id(record), [])):
            kept.insert(0, record)
            used |= {id(root) for root in _roots_of(record)}
    trace.records[:] = kept


def seen_views(trace: Trace, returned: list[View]) -> Seen:
    """Return the views that must be tensors, by root: what is returned or passed to functions of torch."""
    seen: Seen = {}
    for view in returned:
        seen.setdefault(id(view.root), set()).add(view)
    for record in trace.records:
        if record.function is not None or (record.plan is not None and not record.plan.is_straight):
            for view in _views_of(record):
                seen.setdefault(id(view.root), set()).add(view)
    return seen


def reshape_memory(trace: Trace, seen: Seen) -> None:
    """Allocate results in the layout in which they are returned, to save a view, where nothing else needs another."""
    changed: dict[int, dict[int, View]] = {}
    for views in seen.values():
        (view, *others) = views
        root = view.root
        if others or root.argument or view.is_root or root.record.function is not None or not _is_all(view, root):
            continue
        if root.record.plan is not None:
            if not root.record.plan.is_allocated(root.part or 0):
                continue
            changed.setdefault(_place(trace, root.record), {})[root.part or 0] = view
        root.shape, root.strides, root.dtype = view.shape, view.strides, view.dtype
    for i, parts in changed.items():
        record = trace.records[i]
        plan = record.plan.with_layouts({part: (v.shape, v.strides, v.dtype) for part, v in parts.items()})
        _replace(trace, record, record._replace(plan=plan))


def packed_memory(trace: Trace, seen: Seen, places: dict[int, View]) -> tuple[dict[Any, int], int]:
    """Return where scratch lies in one allocation, if one is better, and the size of that.

    Args:
        trace: The call.
        seen: What must be a tensor of its own.
        places: What ``write_in_place`` returned.

    Returns:
        Byte offsets by the id of a root, or by the number of a record and the name of its scratch.
    """
    sizes: dict[Any, int] = {}
    for i, record in enumerate(trace.records):
        results = results_of(trace, record)
        if record.plan is not None and record.plan.is_straight:
            by_name = dict(zip(record.plan.results, results, strict=True))
            for name, memory in record.plan.memory().items():
                root = by_name.get(name)
                used = root is not None and (id(root) in seen or id(root) in places)
                if not used and record.plan.is_asked_for(name) and memory.is_plain:
                    sizes[(i, name) if root is None else id(root)] = _span_of(*layout_of(memory))
        elif record.plan is None and record.function is None and id(results[0]) not in seen and not record.keywords:
            sizes[id(results[0])] = span(results[0])
    sizes = {where: -(-size // _ALIGNMENT) * _ALIGNMENT for where, size in sizes.items()}
    total = sum(sizes.values())
    if not sizes or (not trace.has_out and (len(sizes) < 2 or total > _PACKED_BYTES)):
        return {}, 0
    packed: dict[Any, int] = {}
    for where in sizes:
        packed[where] = sum(sizes[other] for other in packed)
    return packed, total


def _place(trace: Trace, record: Record) -> int:
    return next(i for i, other in enumerate(trace.records) if other is record)


def _replace(trace: Trace, old: Record, new: Record) -> None:
    trace.records[_place(trace, old)] = new
    for root in trace.roots():
        root.record = new if root.record is old else root.record


def _is_all(view: View, root: Root) -> bool:
    """Return True if a view has all bytes of a root, in whatever order."""
    return not view.first and span(view) == span(root) and size(view) == size(root)


def _is_view(value: Any) -> bool:
    return isinstance(value, View)


def _views_of(record: Record) -> list[View]:
    """Return what a record reads and what it overwrites."""
    leaves = torch.utils._pytree.tree_leaves((record.given, record.keywords), is_leaf=_is_view)
    return [*filter(_is_view, leaves), *record.written]


def _roots_of(record: Record) -> list[Root]:
    return [view.root for view in _views_of(record)]


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
