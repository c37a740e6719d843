"""An op by its name."""

from __future__ import annotations

from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.registry import Op


def op_named(name: str) -> Op:
    """Return an op, or raise an ArgumentError that lists all of them."""
    known = {op.name: op for op in registry.ops()}
    if name not in known:
        raise ArgumentError(f"there is no op {name!r}; known: {', '.join(known)}")
    return known[name]
