"""Recent calls of aten overrides: found by one comparison in C++ or by their key, replayed without the handler.

The launches of the first call with one key (``depends.py``) are recorded (``launches.py``), and a function is written
that allocates, launches and returns the same for other addresses (``codegen.py``). Only rows with ``replays=True`` are
recorded: their launches must follow from metadata and numbers, without values that the host reads, and torch's own
kernels must not compute in between.
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten import table
from rtkernels.runtime.call.codegen import UnguardedWriter
from rtkernels.runtime.call.launches import LaunchTrace
from rtkernels.runtime.call.recent import ATTEMPTS, Calls, Known
from rtkernels.runtime.depends import MISS, alias_code, lazy_code, meta_code, number_code, same_number_code
from rtkernels.runtime.invariance import IS_INVARIANT, LEVEL_SCOPE, level
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import never, same_tensors

_LIMIT = 4096  # calls that an override remembers
_NUMBERS = frozenset((bool, int, float, complex))
_NOT_GIVEN = object()
_INDICES = "List[Optional[Tensor]]"  # recorded if one of them is a tensor
_FIRST = (0, 1)
# Compared in the place of an argument that is not a tensor.
_STAND_INS = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in range(24)]
_BY_VALUE = (table.OVERLAP, table.OUT_OF_RANGE)  # reasons that are not in a key: addresses, and numbers that are passed
_all: dict[tuple[str, str], OverrideCalls] = {}


class OverrideCalls(Calls):
    """Recent calls of an overload at a dispatch key.

    ``find``, a function of the overload's arguments, returns ``SMALL`` if all tensors have fewer elements than
    ``limits[measured]``; the result, which may be a ``NotHandled``, of a call that is like a recent one; else MISS.

    Args:
        row: The overload.
        limits: Elements by name of an overload or family.
        measured: A name among them.
        replays: Whether calls are recorded.
    """

    def __init__(self, row: table.Overload, limits: dict[str, int], measured: str, *, replays: bool) -> None:
        super().__init__(_LIMIT)
        self.row, self._scope = row, {"last": (never,)}
        self._arguments = table.schema_of(row.name).arguments
        kinds = [str(argument.type) for argument in self._arguments]
        self.replays = replays and not any("List" in k and "Tensor" in k and k != _INDICES for k in kinds)
        if self.replays:
            self._write(kinds, limits, measured)
            self.find = self._scope["find"]
            return

        def sized(*args: Any, **kwargs: Any) -> Any:
            limit = limits[measured]
            return table.SMALL if limit and not level() and _elements(args) < limit else MISS

        self.find = sized

    def forget(self) -> None:
        """Forget all calls: a plan may have changed."""
        super().forget()
        self._forget_last()

    def _forget_last(self) -> None:
        self._scope["last"] = (never, *self._scope["last"][1:])

    def _write(self, kinds: list[str], limits: dict[str, int], measured: str) -> None:
        """Write ``find`` and ``key_of``."""
        family, arguments = self.row.family, self._arguments
        numbers_too = family in ("ew", "copy")  # a number may come in the place of a tensor
        keys, small, compared, same, kept, pointers, lists, numbers, passed = [], [], [], [], [], [], [], [], []
        for i, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
            x, passes = _parameter_of(argument), argument.name in self.row.passes
            absent = f"{x} is None or {x} is not_given"
            if "Tensor" in kind:
                meta = meta_code(x, f"p_{x}")
                meta += f", {lazy_code(x)}" if family == "copy" else ""  # resolved before, for all others
                fits, pointer, tensor = f"{x}.numel() < limit", f"{x}.data_ptr()", x
                if numbers_too and i:
                    number = f"type({x}) in numbers"
                    meta = f"({number_code(x, passed=passes)}) if {number} else ({meta})"
                    fits, pointer = f"{number} or {fits}", f"0 if {number} else {pointer}"
                    tensor = f"stand_ins[{i}] if {number} else {tensor}"
                    same.append(f"(kept_{i} is None or {same_number_code(x, f'kept_{i}', passed=passes)})")
                    kept.append((i, f"{x} if {number} else None"))
                    numbers += [] if passes else [x]
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
                keys.append(f"({number_code(x, passed=passes)})")
                same.append(same_number_code(x, f"kept_{i}", passed=passes))
                kept.append((i, x))
                passed += [x] if passes else []
                numbers += [] if passes else [x]
            else:
                keys.append(f"{x} if {absent} else tuple({x})" if "List" in kind else x)
                same.append(f"{x} == kept_{i}")
                kept.append((i, x))
        keys += alias_code([x for x, _ in pointers])  # what an address belongs to depends on it
        unlisted = "\n".join(lists)
        take = "\n".join(f"    p_{x} = {pointer}" for x, pointer in pointers)
        self._parameters = [*(x for x, _ in pointers), *(f"p_{x}" for x, _ in pointers), *passed]
        given = ", ".join(self._parameters)
        # Zeros compare equal whatever their sign, and tensors wherever they lie: such calls are found by their key.
        misaligned = " or ".join(f"p_{x} & 15" for x, _ in pointers)
        only_by_key = " or ".join([misaligned, *(f"(type({x}) is float and not {x})" for x in numbers)])
        source = f"""
def find({_listed(arguments)}):
    global last
    if {IS_INVARIANT}:
        return MISS
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
    if found is None or found.replay is None:
        return MISS
    if found.matches is None:
        found.matches = compare([{", ".join(compared)}])
    if not ({only_by_key}):
        last = (found.matches, found.replay, {"".join(f"{value}, " for _, value in kept)})
    return found.replay({given})

def key_of({_listed(arguments)}):
{unlisted}
{take}
    return ({", ".join(keys)},)
"""
        self._scope |= {
            "not_given": _NOT_GIVEN, "numbers": _NUMBERS, "limits": limits, "known": self.known,
            "stand_ins": _STAND_INS, "compare": same_tensors, "only": _only_index, "SMALL": table.SMALL,
            "SEVERAL": table.SEVERAL, "MISS": MISS, "last": (never, None, *[None] * len(kept)), **LEVEL_SCOPE,
        }  # fmt: skip
        generated(source, f"<rtkernels recent calls of aten {self.row.name}>", self._scope)

    def call(self, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the handler for a call that ``find`` did not find, and record what it launches."""
        if not self.replays or level():  # sizes below which torch's kernels are faster must not decide then
            return handler(*args, **kwargs)
        try:
            key = self._scope["key_of"](*args, **kwargs)
        except (AttributeError, TypeError):  # a number in the place of a tensor
            return handler(*args, **kwargs)
        known = self.known.get(key) or self.add(key)
        return self._recorded(known, handler, args, kwargs) if known.attempts < ATTEMPTS else handler(*args, **kwargs)

    def _recorded(self, known: Known, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call the handler, and write a replay if its launches can be repeated."""
        known.attempts += 1
        tensors, numbers, fresh = {}, {}, {}
        for i, argument in enumerate(self._arguments):
            value, name = args[i] if i < len(args) else kwargs.get(argument.name), _parameter_of(argument)
            if str(argument.type) == _INDICES:
                value, _ = _only_index(value)
            if isinstance(value, Tensor):
                tensors[name] = value
            elif type(value) is float and argument.name in self.row.passes:
                # A new object: a number is recognised by its identity where a launch takes it.
                numbers[name] = fresh[argument.name] = value * 1.0
        if not tensors:
            return handler(*args, **kwargs)
        args = tuple(fresh.get(a.name, v) for a, v in zip(self._arguments, args, strict=False))
        kwargs = {name: fresh.get(name, value) for name, value in kwargs.items()}
        with LaunchTrace(tensors, numbers) as trace:
            result = handler(*args, **kwargs)
        if type(result) is table.NotHandled:
            if known.replay is None and result not in _BY_VALUE:
                known.replay = lambda *_: result
            return result
        trace.close()
        returned = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, Tensor)]
        floating = any(t.is_floating_point() for t in returned) or float in map(type, (*args, *kwargs.values()))
        promotes = floating and not any(t.is_floating_point() for t in tensors.values())
        name = f"aten {self.row.name}"
        written = UnguardedWriter(name, self._parameters, trace, promotes=promotes).replay(result)
        known.why_not = trace.refused
        if written is not None:  # else an earlier one may do for other calls with this key
            known.replay = written
            self._forget_last()
        return result


def calls_of(row: table.Overload, key: str, limits: dict[str, int], measured: str, *, replays: bool) -> OverrideCalls:
    """Return recent calls of an overload at a dispatch key: none at first. Arguments as for ``OverrideCalls``."""
    if (before := _all.get((row.name, key))) is not None:
        Plans.replays.remove(before.forget)
    _all[row.name, key] = made = OverrideCalls(row, limits, measured, replays=replays)
    return made


def known_calls(name: str, key: str) -> dict[Any, Known]:
    """Return what is known of the calls of an overload, by key."""
    return _all[name, key].known if (name, key) in _all else {}


def _only_index(indices: Any) -> tuple[Tensor | None, tuple[int, int]]:
    """Return the one tensor of a list, with its place and the list's length; None if there are others."""
    if len(indices) == 1 and indices[0] is not None:
        return indices[0], _FIRST
    given = [i for i, tensor in enumerate(indices) if tensor is not None]
    return (indices[given[0]], (given[0], len(indices))) if len(given) == 1 else (None, _FIRST)


def _parameter_of(argument: Any) -> str:
    """Return the name of an argument as Python takes it."""
    return f"{argument.name}_" if keyword.iskeyword(argument.name) else argument.name


def _listed(arguments: Any) -> str:
    """Return the parameters of a function that takes what the dispatcher gives: no trailing defaults."""
    listed: list[str] = []
    for i, argument in enumerate(arguments):
        if argument.kwarg_only and "*" not in listed:
            listed.append("*")
        listed.append(f"{_parameter_of(argument)}=not_given" if i else _parameter_of(argument))
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
