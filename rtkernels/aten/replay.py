"""Calls of an override that are like one before are done by a function written out for them (``finding`` finds it).

The first call of its kind runs the handler while a *tape* notes what that launches: plans, the tensors whose addresses
they take, and the tensors they make. If the result is made of these alone, a function is written that allocates,
launches and returns the same for the next call with the same metadata and the same numbers. Only rows with
``replays=True`` are noted: their handlers' launches must follow from metadata and numbers, without values that the host
reads, and torch's own kernels must not compute in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rtkernels.aten import table
from rtkernels.aten.finding import INDICES, Known, Replay, only, parameter
from rtkernels.runtime.launch.memory import allocator
from rtkernels.runtime.layout import extent, may_overlap
from rtkernels.runtime.operator.tape import Call, tape
from rtkernels.runtime.operator.written import written_code

_LIMIT = 4096  # calls of an overload that are known at a time


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
        tensors = [parameter(argument) for argument in arguments if "Tensor" in str(argument.type)]
        self.parameters = ", ".join([*tensors, *(f"p_{tensor}" for tensor in tensors)])
        self.given: list[tuple[str, Tensor]] = []
        self.made: dict[tuple[int, int], tuple[str, Tensor]] = {}
        for i, argument in enumerate(arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if str(argument.type) == INDICES:
                value, _ = only(value)
            if isinstance(value, Tensor):
                self.given.append((parameter(argument), value))

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
