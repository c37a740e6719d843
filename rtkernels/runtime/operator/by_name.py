"""Calls functions of a declaration with the arguments of the operator that their parameters name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from rtkernels.runtime.operator.kinds import Meta


def by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return `function` as a function of the values with these names, in order.

    It gets the values that its parameters name, so operators with different arguments can share it. A parameter with a
    default value need not be among the names. A parameter annotated with a NamedTuple gets a record of the values that
    the fields name; fields follow the same rule.

    Raises:
        ValueError: `function` takes ``*values``, or a parameter or field is not among the names.
    """
    parameters = [*inspect.signature(function).parameters.values()]
    if starred := [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ValueError(f"{_called(function)} takes {starred[0]}; expected parameters named {', '.join(names)}")
    if [p.name for p in parameters] == [*names]:
        return function
    places = {name: i for i, name in enumerate(names)}
    found: dict[str, Callable[[Sequence[Any]], Any]] = {}
    for parameter in parameters:
        if parameter.name in places:
            found[parameter.name] = itemgetter(places[parameter.name])
        elif record := _record_of(function, parameter):
            found[parameter.name] = _record(record, places, function)
        elif parameter.default is parameter.empty:
            raise ValueError(f"{_called(function)} takes {parameter.name}; expected some of {', '.join(names)}")
    return lambda *values: function(**{name: get(values) for name, get in found.items()})


def _called(function: Callable[..., Any]) -> str:
    while hasattr(function, "func"):  # of a partial function
        function = function.func
    code = getattr(function, "__code__", None)
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})" if code else repr(function)


def _record_of(function: Callable[..., Any], parameter: inspect.Parameter) -> type[Any] | None:
    """Return the NamedTuple that a parameter is annotated with, if it is."""
    while hasattr(function, "func"):
        function = function.func
    found = parameter.annotation
    if isinstance(found, str):  # as in modules with ``from __future__ import annotations``
        found = getattr(function, "__globals__", {}).get(found)
    return found if isinstance(found, type) and hasattr(found, "_fields") and found is not Meta else None


def _record(record: type[Any], places: dict[str, int], function: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    wanted = {field: places[field] for field in record._fields if field in places}
    if unknown := [field for field in record._fields if field not in places and field not in record._field_defaults]:
        raise ValueError(
            f"{_called(function)} takes a {record.__name__} with {', '.join(unknown)}; "
            f"expected some of {', '.join(places)}"
        )
    return lambda values: record(**{field: values[i] for field, i in wanted.items()})
