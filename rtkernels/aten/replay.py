"""Calls of an override that are like one before: found by one look in a dictionary, done by a function written out for
them.

The first call of its kind runs the handler while a *tape* notes what that launches: plans, the tensors whose addresses
they take, and the tensors they make. If the result is made of these alone, a function is written that allocates,
launches and returns the same for the next call with the same metadata and the same numbers. Only rows with
``replays=True`` are noted: their handlers' launches must follow from metadata and numbers, without values that the host
reads, and torch's own kernels must not compute in between.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten import table
from rtkernels.aten.written_replay import INDICES, Ambiguous, Replay, only_index, parameter_of, written_replay
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.tape import tape
from rtkernels.runtime.operator.written import written_code
from rtkernels.runtime.torch_private import never, same_tensors

_LIMIT = 4096
_NUMBERS = frozenset((bool, int, float, complex))
_NOT_GIVEN = object()
# By the place of an argument that is no tensor.
_STAND_INS = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in range(24)]
Finder = tuple[Callable[..., Any], Callable[..., Any]]
_all: dict[tuple[str, str], dict[Any, Any]] = {}
_finders: dict[tuple[str, str], dict[str, Any]] = {}  # what the functions of ``finder`` know


# ---- looking up -----------------------------------------------------------------------------------------------------


class Known:
    """What is kept of one key: the function, and whether tensors are just like those it was made for."""

    __slots__ = ("matches", "replay")

    def __init__(self, replay: Replay) -> None:
        self.replay, self.matches = replay, None


def finder(name: str, family: str, key: str, limits: dict[str, int], measured: str, *, replays: bool) -> Finder:
    """Return ``find`` and ``key_of``, functions of the arguments of an overload at a dispatch key.

    ``find`` gives ``SMALL`` if all tensors have fewer elements than ``limits[measured]``; the result, which may be a
    ``NotHandled``, of a call that is like one before; else None. A call like the very last one is recognised by one
    comparison in C++. ``key_of`` gives the key under which ``replays_of`` has the replay of a call, or None for
    an overload without any.
    """
    arguments = table.schema_of(name).arguments
    kinds = [str(argument.type) for argument in arguments]
    if not replays or any("List" in kind and "Tensor" in kind and kind != INDICES for kind in kinds):

        def sized(*args: Any, **kwargs: Any) -> Any:
            limit = limits[measured]
            return table.SMALL if limit and _elements(args) < limit else None

        return sized, lambda *args, **kwargs: None
    numbers_too = family in ("ew", "copy")  # a number may come in the place of a tensor
    keys, small, compared, same, kept, pointers, lists = [], [], [], [], [], [], []
    for i, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
        x = parameter_of(argument)
        absent = f"{x} is None or {x} is not_given"
        if "Tensor" in kind:
            meta = f"{x}.shape, {x}.stride(), {x}.dtype, {x}.get_device(), p_{x} & 15"
            meta += f", {x}.is_neg(), {x}.is_conj()" if family == "copy" else ""  # resolved before, for all others
            fits, pointer, tensor = f"{x}.numel() < limit", f"{x}.data_ptr()", x
            if numbers_too and i:
                number = f"type({x}) in numbers"
                meta = f"({_number_key(x)}) if {number} else ({meta})"
                fits, pointer = f"{number} or {fits}", f"0 if {number} else {pointer}"
                tensor = f"stand_ins[{i}] if {number} else {tensor}"
                same.append(f"(kept_{i} is None or ({x} == kept_{i} and type({x}) is type(kept_{i})))")
                kept.append((i, f"{x} if {number} else None"))
            if kind == INDICES:
                lists.append(f"    {x}, place_{x} = only({x})\n    if {x} is None:\n        return SEVERAL")
                meta += f", place_{x}"
                same.append(f"place_{x} == kept_{i}")
                kept.append((i, f"place_{x}"))
            elif kind != "Tensor":
                meta, fits = f"None if {absent} else ({meta})", f"{absent} or {fits}"
                pointer, tensor = f"0 if {absent} else {pointer}", f"stand_ins[{i}] if {absent} else {tensor}"
            keys.append(f"({meta})")
            small.append(f"({fits})")
            pointers.append((x, pointer))
            compared.append(f"({tensor})")
        elif "number" in kind or "float" in kind:
            keys.append(_number_key(x))
            same.append(f"{x} == kept_{i} and type({x}) is type(kept_{i})")
            kept.append((i, x))
        else:
            keys.append(f"{x} if {absent} else tuple({x})" if "List" in kind else x)
            same.append(f"{x} == kept_{i}")
            kept.append((i, x))
    # Tensors that are one are so in the next call, too: what an address belongs to depends on it.
    names = [x for x, _ in pointers]
    keys += [f"{y} is {x}" for i, x in enumerate(names) for y in names[i + 1 :]]
    parameters = _parameters(arguments, "not_given")
    numbers = [parameter_of(a) for a, k in zip(arguments, kinds, strict=True) if "number" in k or "float" in k]
    numbers += [x for x, _ in pointers[1:]] if numbers_too else []
    unlisted = "\n".join(lists)
    take = "\n".join(f"    p_{x} = {pointer}" for x, pointer in pointers)
    given = ", ".join([*(x for x, _ in pointers), *(f"p_{x}" for x, _ in pointers)])
    # Zeros compare equal whatever their sign, and tensors wherever they lie: such calls are found by their key.
    misaligned = " or ".join(f"p_{x} & 15" for x, _ in pointers)
    only_by_key = " or ".join([misaligned, *(f"(type({x}) is float and not {x})" for x in numbers)])
    source = f"""
def find({parameters}):
    global last
{unlisted}
    limit = limits[{measured!r}]
    if limit and {" and ".join(small)}:
        return SMALL
    matches, replay, {"".join(f"kept_{i}, " for i, _ in kept)}= last
    if {" and ".join([f"matches({', '.join(compared)})", *same])}:
{textwrap.indent(take, "    ")}
        if not ({misaligned}):
            return replay({given})
{take}
    found = known.get(({", ".join(keys)},))
    if found is None:
        return None
    if found.matches is None:
        found.matches = compare([{", ".join(compared)}])
    if not ({only_by_key}):
        last = (found.matches, found.replay, {"".join(f"{value}, " for _, value in kept)})
    return found.replay({given})

def key_of({parameters}):
{unlisted}
{take}
    return ({", ".join(keys)},)
"""
    scope = {
        "not_given": _NOT_GIVEN, "numbers": _NUMBERS, "limits": limits, "known": replays_of(name, key),
        "stand_ins": _STAND_INS, "compare": _comparison, "only": only_index, "SMALL": table.SMALL,
        "SEVERAL": table.SEVERAL,
        "last": (never, None, *[None] * len(kept)),
    }  # fmt: skip
    exec(written_code(source, f"<rtkernels finder of aten {name}>"), scope)
    _finders[name, key] = scope
    return scope["find"], scope["key_of"]


def _comparison(tensors: list[Tensor]) -> Callable[..., bool]:
    """Return a function that says whether tensors are like these, and one where these are: C++ wants different ones."""
    places = {id(tensor): i for i, tensor in reversed([*enumerate(tensors)])}
    if len(places) == len(tensors):
        return same_tensors(tensors)
    first = sorted(places.values())
    matches = same_tensors([tensors[i] for i in first])
    pairs = [(i, places[id(tensor)]) for i, tensor in enumerate(tensors) if places[id(tensor)] != i]

    def same(*given: Tensor) -> bool:
        return all(given[i] is given[j] for i, j in pairs) and matches(*[given[i] for i in first])

    return same


def _number_key(x: str) -> str:
    """Return what is told apart of a number: 1 is not 1.0, and 0.0 not -0.0; all NaN are one, which equal nothing."""
    return f"type({x}), {x} if {x} and {x} == {x} else str({x})"


def _parameters(arguments: Any, default: str) -> str:
    """Return the parameters of a function that takes what the dispatcher gives: no trailing defaults."""
    listed: list[str] = []
    for i, argument in enumerate(arguments):
        if argument.kwarg_only and "*" not in listed:
            listed.append("*")
        listed.append(f"{parameter_of(argument)}={default}" if i else parameter_of(argument))
    return ", ".join(listed)


def _elements(args: tuple[Any, ...]) -> int:
    """Return how many elements the largest tensor has, or those of a list together."""
    found = -1
    for value in args:
        if isinstance(value, Tensor):
            found = max(found, value.numel())
        elif isinstance(value, (list, tuple)) and any(isinstance(tensor, Tensor) for tensor in value):
            found = max(found, sum(tensor.numel() for tensor in value if tensor is not None))
    return found if found >= 0 else 1 << 62  # factories: their sizes are no tensors


# ---- replays --------------------------------------------------------------------------------------------------------


def replays_of(name: str, key: str) -> dict[Any, Known | None]:
    """Return what is known of an overload, by keys; None stands for calls that only the handler can do."""
    return _all.setdefault((name, key), {})


def forget() -> None:
    """Forget all of them: a plan may have changed."""
    for known in _all.values():
        known.clear()
    for scope in _finders.values():
        scope["last"] = (never, *scope["last"][1:])


Plans.replays.append(forget)


def watched(handler: Callable[..., Any], name: str, known: dict[Any, Any], key: Any, args: Any, kwargs: Any) -> Any:
    """Call a handler, and keep a replay under `key` if its call can be repeated."""
    tape.calls = calls = []
    try:
        result = handler(*args, **kwargs)
    finally:
        tape.calls = None
    if len(known) >= _LIMIT:
        known.clear()
    if type(result) is table.NotHandled:
        if result is not table.OVERLAP:  # which depends on addresses; all other reasons are in the key
            known[key] = Known(lambda *_: result)
        return result
    try:
        made = written_replay(name, args, kwargs, calls, result)
    except Ambiguous:
        if ("ambiguous", key) not in known:  # the next call of this kind may be clear; it has one chance
            known["ambiguous", key] = None
            return result
        made = None
    known[key] = None if made is None else Known(made)
    return result
