"""What a declaration's functions get: those arguments of the operator that their parameters name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return `function` as a function of all values that have these names, in order.

    It gets those that its parameters name, so that operators with different arguments can share it: a parameter with
    a default value need not be among them. A function with ``*values``, or with a name of its own for a value, gets
    all of them by their order.

    Raises:
        ValueError: It takes neither some of the names nor as many values as there are, or by their order one would
            come under the name of another.
    """
    parameters = [*inspect.signature(function).parameters.values()]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return function
    unknown = [p.name for p in parameters if p.name not in names]
    if [p.name for p in parameters if p.name in names] == [*names] and not unknown:
        return function
    required = [p.name for p in parameters if p.default is p.empty]
    if not set(required) & set(unknown):
        wanted = {p.name: list(names).index(p.name) for p in parameters if p.name in names}
        return lambda *values: function(**{name: values[i] for name, i in wanted.items()})
    if not len(required) <= len(names) <= len(parameters):
        raise ValueError(f"{function} takes {', '.join(unknown)}; expected some of {', '.join(names)}")
    if misplaced := [p.name for p, name in zip(parameters, names, strict=False) if p.name in names and p.name != name]:
        raise ValueError(
            f"{function} takes {', '.join(unknown)}, so values come by their order, and not as {', '.join(misplaced)}; "
            f"expected some of {', '.join(names)}"
        )
    return function
