"""Calls of an override that are like one before: found by one look in a dictionary, done by a function written out for
them.

The first call of its kind runs the handler while a *tape* notes what that launches: plans, the tensors whose addresses
they take, and the tensors they make. If the result is made of these alone, a function is written that allocates,
launches and returns the same for the next call with the same metadata and the same numbers. Only rows with
``replays=True`` are noted: their handlers' launches must follow from metadata and numbers, without values that the host
reads, and torch's own kernels must not compute in between.
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten import table
from rtkernels.runtime.launch.memory import allocator
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import extent, may_overlap
from rtkernels.runtime.operator.tape import Call, tape
from rtkernels.runtime.operator.written import written_code
from rtkernels.runtime.torch_private import never, same_tensors

_LIMIT = 4096
_INDICES = "List[Optional[Tensor]]"  # of which one is a tensor in calls that can be repeated
_NUMBERS = frozenset((bool, int, float, complex))
_NOT_GIVEN = object()
_FIRST = (0, 1)
_STAND_INS = [torch.empty(0, device="cpu") for _ in range(24)]  # by the place of an argument that is no tensor
Replay = Callable[..., Any]  # takes the tensors among the arguments, then their addresses
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
    if not replays or any("List" in kind and "Tensor" in kind and kind != _INDICES for kind in kinds):

        def sized(*args: Any, **kwargs: Any) -> Any:
            limit = limits[measured]
            return table.SMALL if limit and _elements(args) < limit else None

        return sized, lambda *args, **kwargs: None
    numbers_too = family in ("ew", "copy")  # a number may come in the place of a tensor
    keys, small, compared, same, kept, pointers, lists = [], [], [], [], [], [], []
    for i, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
        x = _parameter(argument)
        absent = f"{x} is None or {x} is not_given"
        if "Tensor" in kind:
            meta = f"{x}.shape, {x}.stride(), {x}.dtype, {x}.get_device(), p_{x} & 15"
            meta += f", {x}.is_neg(), {x}.is_conj()" if family == "copy" else ""  # resolved before, for all others
            fits, pointer, tensor = f"{x}.numel() < limit", f"{x}.data_ptr()", x
            if numbers_too and i:
                number = f"type({x}) in numbers"
                meta = f"(type({x}), {x} or str({x})) if {number} else ({meta})"
                fits, pointer = f"{number} or {fits}", f"0 if {number} else {pointer}"
                tensor = f"stand_ins[{i}] if {number} else {tensor}"
                same.append(f"(kept_{i} is None or ({x} == kept_{i} and type({x}) is type(kept_{i})))")
                kept.append((i, f"{x} if {number} else None"))
            if kind == _INDICES:
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
            keys.append(f"type({x}), {x} or str({x})")  # 1 is not 1.0, and 0.0 not -0.0
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
    numbers = [_parameter(a) for a, k in zip(arguments, kinds, strict=True) if "number" in k or "float" in k]
    numbers += [x for x, _ in pointers[1:]] if numbers_too else []
    unlisted = "\n".join(lists)
    take = "\n".join(f"    p_{x} = {pointer}" for x, pointer in pointers)
    given = ", ".join([*(x for x, _ in pointers), *(f"p_{x}" for x, _ in pointers)])
    # Zeros compare equal whatever their sign: they are found by their key.
    zero = " or ".join(f"(type({x}) is float and not {x})" for x in numbers) or "False"
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
        if not ({" or ".join(f"p_{x} & 15" for x, _ in pointers)}):
            return replay({given})
{take}
    found = known.get(({", ".join(keys)},))
    if found is None:
        return None
    if found.matches is None:
        found.matches = compare([{", ".join(compared)}])
    if not ({zero}):
        last = (found.matches, found.replay, {"".join(f"{value}, " for _, value in kept)})
    return found.replay({given})

def key_of({parameters}):
{unlisted}
{take}
    return ({", ".join(keys)},)
"""
    scope = {
        "not_given": _NOT_GIVEN, "numbers": _NUMBERS, "limits": limits, "known": replays_of(name, key),
        "stand_ins": _STAND_INS, "compare": _comparison, "only": _only, "SMALL": table.SMALL,
        "SEVERAL": table.SEVERAL,
        "last": (never, None, *[None] * len(kept)),
    }  # fmt: skip
    exec(written_code(source, f"<rtkernels finder of aten {name}>"), scope)
    _finders[name, key] = scope
    return scope["find"], scope["key_of"]


def _only(indices: Any) -> tuple[Tensor | None, tuple[int, int]]:
    """Return the one tensor of a list, with its place and the list's length; None if there are others."""
    if len(indices) == 1 and indices[0] is not None:
        return indices[0], _FIRST
    given = [i for i, tensor in enumerate(indices) if tensor is not None]
    return (indices[given[0]], (given[0], len(indices))) if len(given) == 1 else (None, _FIRST)


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


def _parameter(argument: Any) -> str:
    return f"{argument.name}_" if keyword.iskeyword(argument.name) else argument.name


def _parameters(arguments: Any, default: str) -> str:
    """Return the parameters of a function that takes what the dispatcher gives: no trailing defaults."""
    listed: list[str] = []
    for i, argument in enumerate(arguments):
        if argument.kwarg_only and "*" not in listed:
            listed.append("*")
        listed.append(f"{_parameter(argument)}={default}" if i else _parameter(argument))
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
        made = _Writer(name, args, kwargs).replay(calls, result)
    except _Ambiguous:
        if ("ambiguous", key) not in known:  # the next call of this kind may be clear; it has one chance
            known["ambiguous", key] = None
            return result
        made = None
    known[key] = None if made is None else Known(made)
    return result


class _Ambiguous(Exception):
    """Two arguments share memory, so one cannot say which of them an address came from."""


class _Unknown(Exception):
    """A launch uses memory that is neither an argument's nor made by another launch."""


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return storage and byte of the first element: addresses are objects in the emulator."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


class _Writer:
    """Writes the function of one tape."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.scope, self.lines = name, {}, []
        arguments = table.schema_of(name).arguments
        tensors = [_parameter(argument) for argument in arguments if "Tensor" in str(argument.type)]
        self.parameters = ", ".join([*tensors, *(f"p_{tensor}" for tensor in tensors)])
        self.given: list[tuple[str, Tensor]] = []
        self.made: dict[tuple[int, int], tuple[str, Tensor]] = {}
        for i, argument in enumerate(arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if str(argument.type) == _INDICES:
                value, _ = _only(value)
            if isinstance(value, Tensor):
                self.given.append((_parameter(argument), value))

    def replay(self, calls: list[Call | None], result: Any) -> Replay | None:
        """Return a function that makes `result` of arguments like these; None if there is none."""
        try:
            for i, call in enumerate(calls):
                if call is None:
                    return None
                self._add(i, call)
            self._return(calls, result)
        except _Unknown:
            return None
        source = f"def replay({self.parameters}):\n    " + "\n    ".join(self.lines) + "\n"
        exec(written_code(source, f"<rtkernels replay of aten {self.name}>"), self.scope)
        return self.scope["replay"]

    def _argument(self, tensor: Tensor) -> tuple[str, int] | None:
        """Return the argument that a tensor is or views, and the bytes between their first elements."""
        for name, value in self.given:
            if value is tensor:
                return name, 0
        storage, start = _place(tensor)
        sharing = [(name, value) for name, value in self.given if _place(value)[0] == storage]
        if len(sharing) > 1:
            raise _Ambiguous
        return (sharing[0][0], start - _place(sharing[0][1])[1]) if sharing else None

    def _address(self, tensor: Tensor | None) -> str:
        if tensor is None:
            return "0"
        found = self._argument(tensor)
        if found is not None:
            name, offset = found
            return f"p_{name} + {offset}" if offset else f"p_{name}"
        expression, made = self._made_with(tensor)
        offset = _place(tensor)[1] - _place(made)[1]
        return f"{expression}.data_ptr() + {offset}" if offset else f"{expression}.data_ptr()"

    def _made_with(self, tensor: Tensor) -> tuple[str, Tensor]:
        """Return what a launch made that a tensor is or views."""
        storage, _ = _place(tensor)
        for (place, _), found in self.made.items():
            if place == storage:
                return found
        raise _Unknown

    def _add(self, i: int, call: Call) -> None:
        tensors = list(call.tensors)
        self.scope[f"run_{i}"] = call.run
        before = []
        if call.overlaps is not None:
            out = tensors.pop(0)
            before = [self._written_to(i, out, call.made)]
            name = before[0].removesuffix(".data_ptr()").removeprefix("p_")
            read = [self._argument(tensor) for tensor in tensors if tensor is not None]
            others = {found[0] for found in read if found is not None}
            if not name.startswith("made_"):
                for other in sorted(others - {name}):
                    self.lines.append(f"if {self._overlap(i, call, other, name)}: return None")
        numbers = [f"number_{i}_{j}" for j in range(len(call.numbers))]
        self.scope.update(zip(numbers, call.numbers, strict=True))
        run = f"run_{i}({', '.join([*before, *map(self._address, tensors), *numbers])})"
        if before:
            self.lines.append(run)
            return
        self.lines.append(f"made_{i} = {run}")
        several = isinstance(call.made, (tuple, list))
        for j, tensor in enumerate(call.made if several else (call.made,)):
            if isinstance(tensor, Tensor) and tensor.numel():
                self.made[_place(tensor)] = f"made_{i}[{j}]" if several else f"made_{i}", tensor

    def _overlap(self, i: int, call: Call, other: str, out: str) -> str:
        """Return the question whether an argument shares memory with the one that a launch writes to."""
        if call.overlaps is not may_overlap:
            self.scope[f"overlaps_{i}"] = call.overlaps
            return f"overlaps_{i}({other}, {out})"
        given = dict(self.given)  # sizes and strides are those of the key: two comparisons of addresses will do
        reach = {name: extent(given[name])[1] - extent(given[name])[0] for name in (other, out)}
        return f"p_{other} < p_{out} + {reach[out]} and p_{out} < p_{other} + {reach[other]}"

    def _written_to(self, i: int, out: Tensor, known_as: Tensor) -> str:
        """Return the address of what a launch writes to; it may be memory that the handler allocated for it."""
        found = self._argument(out)
        if found is not None:
            if found[1] or next(value for name, value in self.given if name == found[0]).dtype != known_as.dtype:
                raise _Unknown
            self.made[_place(out)] = found[0], known_as
            return f"p_{found[0]}"
        storage, start = _place(out)
        for (place, begin), (expression, _) in self.made.items():
            if place == storage:  # a part of what another launch made, or of an argument
                if not expression.startswith("made_"):
                    raise _Unknown
                return f"{expression}.data_ptr() + {start - begin}"
        if start or out.untyped_storage().nbytes() != out.numel() * out.element_size():
            raise _Unknown
        self.scope["allocate"] = allocator(out.get_device())
        self.scope[f"memory_{i}"] = tuple(known_as.shape), tuple(known_as.stride()), known_as.dtype
        self.lines.append(f"made_{i} = allocate(*memory_{i})")
        self.made[_place(out)] = f"made_{i}", known_as
        return f"made_{i}.data_ptr()"

    def _return(self, calls: list[Call | None], result: Any) -> None:
        several = isinstance(result, (tuple, list))
        returned = [self._returned(value) for value in (result if several else (result,))]
        made = calls[0].made if len(calls) == 1 else None
        if isinstance(made, tuple) and returned == [f"made_0[{j}]" for j in range(len(made))]:
            self.lines.append("return made_0")
        else:
            self.lines.append(f"return ({', '.join(returned)},)" if several else f"return {returned[0]}")

    def _returned(self, value: Any) -> str:
        if value is None:
            return "None"
        if not isinstance(value, Tensor):
            raise _Unknown
        expression, tensor = self._made_with(value)
        if value.dtype != tensor.dtype or any(value.untyped_storage()._cdata == _place(t)[0] for _, t in self.given):
            if value is tensor:  # an argument that was written
                return expression
            raise _Unknown
        if (value.shape, value.stride(), value.storage_offset()) == (tensor.shape, tensor.stride(), 0):
            return expression
        if tensor.storage_offset():
            raise _Unknown
        if value.numel() == tensor.numel() and value.is_contiguous() and tensor.is_contiguous():
            return f"{expression}.view({tuple(value.shape)})"
        return f"{expression}.as_strided({tuple(value.shape)}, {value.stride()}, {value.storage_offset()})"
