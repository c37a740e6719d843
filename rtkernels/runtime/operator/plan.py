"""Plans: what a call does, worked out from everything but the addresses of its tensors (see ``TorchOp``).

A ``StepPlan`` is a list of launches and the memory between them; its ``run`` is written out from that, so that a launch
costs one Python call and no loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ResidencyError
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.memory import allocator, dense_strides, fresh_zeros, kept_zeros
from rtkernels.runtime.launch.tensor_map import tiled_map
from rtkernels.runtime.operator import into
from rtkernels.runtime.operator.written import written_code

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "byte": 1}
_MAPS_PER_STEP = 256  # addresses whose tensor maps an argument remembers


class Plan(ABC):
    """One call of an operator, to be run as often as it comes again."""

    __slots__ = ("matches",)
    converted: Mapping[str, Any] | None = None  # see Steps

    def __init__(self) -> None:
        self.matches: Callable[..., bool] | None = None  # its operator finds it again by this; made at its first use

    @abstractmethod
    def run(self, *addresses: int) -> Any:
        """Allocate results, launch and return them. Addresses are those of the operator's tensors, 0 for None."""


class Memory(NamedTuple):
    """A tensor that a call makes: a result, or scratch. Dense unless it has `strides`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    zero: bool = False  # cleared first
    fill: float | None = None  # or filled with this number
    fresh: bool = False  # int32 zeros in one dimension that cost no launch (``memory.fresh_zeros``)


class Boxes(NamedTuple):
    """A kernel argument: the tensor map of an argument, a result or scratch. Fields as for ``tensor_map.tiled_map``."""

    name: str
    token: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: bool = True
    promote: bool = True
    offset: int = 0  # bytes from the tensor's first element


def matrix_boxes(
    name: str, token: str, rows: int, cols: int, pitch: int, box_rows: int, box_cols: int, **more: Any
) -> Boxes:
    """Return the tensor map of a row-major matrix; arguments as for ``tensor_map.matrix_map``."""
    return Boxes(name, token, (cols, rows), (pitch * ITEM_BYTES[token],), (box_cols, box_rows), **more)


class Offset(NamedTuple):
    """A kernel argument: an address `offset` bytes behind the first element of a tensor."""

    name: str
    offset: int


class Step:
    """One launch of a plan.

    Args:
        launch: What ``Kernel.bind`` gave.
        arguments: Those of the kernel, in its order: the name of a tensor (its address goes in, 0 if it is absent) or
            of a number of the call, ``Boxes``, ``Offset``, or a number. Numbers, and zeros for absent tensors, are
            packed one time, not each time.
    """

    __slots__ = ("arguments", "launch")

    def __init__(self, launch: Launch, *arguments: str | int | float | Boxes | Offset) -> None:
        self.launch, self.arguments = launch, arguments


class Steps:
    """What a declared operator's ``plan`` returns: launches, one after the other, and the memory they share.

    Args:
        steps: May be none: the results are then left as they were made.
        scratch: Memory that lives as long as the call, by name.
        zeros: How many int32 zeros an argument of this name gets, cleared for this call.
        kept: Tensors that a plan uses in every call, by name.
        before: Called first, in every call.
        after: Called last.
        kept_zeros: How many int32 an argument of this name gets that kernels leave as zeros, as they found them.
        if_not_resident: Makes other steps, for a device that refuses a launch whose blocks must all be resident.
        converted: Arguments that are converted first: to other dtypes, and dense, or by a function.
        instead: Instead of launches, a function of the operator's arguments that calls other operators.
    """

    __slots__ = (
        "after", "before", "converted", "if_not_resident", "instead", "kept", "kept_zeros", "scratch", "steps", "zeros",
    )  # fmt: skip

    def __init__(
        self, *steps: Step, scratch: Mapping[str, Memory] | None = None, zeros: Mapping[str, int] | None = None,
        converted: Mapping[str, torch.dtype | Callable[[Tensor], Tensor]] | None = None,
        instead: Callable[..., Any] | None = None, kept_zeros: Mapping[str, int] | None = None,
        if_not_resident: Callable[[], Steps] | None = None, kept: Mapping[str, Tensor] | None = None,
        before: Callable[[], None] | None = None, after: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.steps, self.scratch, self.zeros = steps, dict(scratch or {}), dict(zeros or {})
        self.converted, self.instead, self.if_not_resident = converted, instead, if_not_resident
        self.kept_zeros, self.kept, self.before, self.after = dict(kept_zeros or {}), dict(kept or {}), before, after


IN_TORCH = Steps()  # instead of launches: plain torch does what this call asks for, on its device


class StepPlan(Plan):
    """A plan whose ``run`` is written out from its steps.

    ``run_plain`` does the same for calls that no ``autograd.Function`` sees: results that nobody asked for are then the
    same empty tensors in all calls, which saves their allocation.

    Args:
        name: The operator's, for tracebacks.
        arguments: Names of the operator's tensors, in the order of its schema.
        numbers: Names of the numbers that follow the addresses.
        outputs: Results by name, in the order in which they are returned; None for one that nobody asked for.
        returned: How: the only one itself ("single"), a "tuple" or a "list".
        steps: What the operator's ``plan`` gave.
        device: CUDA ordinal, or -1.
        absent: Arguments that are None in all calls of this plan.
    """

    __slots__ = ("_made_of", "converted", "run", "run_plain", "source", "steps")

    def __init__(
        self, name: str, arguments: Sequence[str], numbers: Sequence[str], outputs: Mapping[str, Memory | None],
        returned: str, steps: Steps, device: int, absent: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.converted, self.steps = steps.converted, steps.steps
        self._made_of = name, arguments, numbers, outputs, returned, steps, device, absent
        scope: dict[str, Any] = {"allocate": allocator(device), "device": device}
        scope |= {"memory": into.memory, "calls_under_way": into.calls_under_way}
        scope |= {"fresh_zeros": fresh_zeros, "kept_zeros": kept_zeros, "ResidencyError": ResidencyError}
        lines: list[str] = []
        in_plain: dict[str, str] = {}  # lines of ``run`` and what ``run_plain`` has instead
        known = {argument: "0" if argument in absent else f"p_{argument}" for argument in arguments}
        known |= {number: number for number in numbers}
        made = {name: memory or Memory((0,), torch.float32) for name, memory in outputs.items()}
        for variable, memory in {**made, **steps.scratch}.items():
            if variable in known:
                raise ValueError(f"{name}: {variable} is the name of two tensors")
            strides = dense_strides(memory.shape) if memory.strides is None else tuple(memory.strides)
            layout = {"shape": tuple(memory.shape), "strides": strides, "dtype": memory.dtype}
            scope[f"m_{variable}"] = tuple(layout.values())
            scope |= {f"{part}_{variable}": value for part, value in layout.items()}
            given = f"memory('{name}.{variable}', m_{variable}, allocate)"
            allocated = f"allocate(shape_{variable}, strides_{variable}, dtype_{variable})"
            made_by = f"{allocated} if not calls_under_way else {given}"
            if memory.fresh:
                made_by = f"fresh_zeros(device, {memory.shape[0]}) if not calls_under_way else {given}.zero_()"
            lines.append(f"t_{variable} = ({made_by}){_fill_call(memory)}")
            if variable in outputs and outputs[variable] is None:
                known[variable] = "0"
                scope[f"e_{variable}"] = scope["allocate"](*scope[f"m_{variable}"])
                in_plain[lines[-1]] = f"t_{variable} = e_{variable} if not calls_under_way else {given}"
            else:
                known[variable] = f"t_{variable}.data_ptr()"
        for variable, count in steps.zeros.items():
            lines.append(f"t_{variable} = fresh_zeros(device, {count})")
            known[variable] = f"t_{variable}.data_ptr()"
        for variable, tensor in steps.kept.items():
            scope[f"t_{variable}"] = tensor
            known[variable] = f"t_{variable}.data_ptr()"
        for variable, count in steps.kept_zeros.items():
            lines.append(f"t_{variable} = kept_zeros(device, {count})")
            known[variable] = f"t_{variable}.data_ptr()"
        for i, step in enumerate(steps.steps):
            fixed = {j: 0 if known.get(a) == "0" else a for j, a in enumerate(step.arguments) if _is_fixed(a, known)}
            fixed = fixed if hasattr(step.launch, "with_fixed") else {}
            scope[f"launch_{i}"] = step.launch.with_fixed(fixed) if fixed else step.launch
            given = {j: a for j, a in enumerate(step.arguments) if j not in fixed}
            written = [self._written(f"{i}_{j}", a, known, scope) for j, a in given.items()]
            lines.append(f"launch_{i}({', '.join(written)})")
        for name_of_call in ("before", "after"):
            if getattr(steps, name_of_call) is not None:
                scope[name_of_call] = getattr(steps, name_of_call)
                lines.insert(0 if name_of_call == "before" else len(lines), f"{name_of_call}()")
        results = "".join(f"t_{variable}, " for variable in outputs)
        if returned == "list":
            results = f"[{results}]"
        elif returned == "single":
            results = results[:-2]
        lines.append(f"return {results or None}")
        names = ", ".join([*(f"p_{argument}" for argument in arguments), *numbers])
        if steps.if_not_resident is not None:
            others: list[Callable[..., Any]] = []
            scope["others"] = others
            scope["make_others"] = lambda: others.append(
                StepPlan(name, arguments, numbers, outputs, returned, steps.if_not_resident(), device, absent).run
            )
            tried = "\n    ".join(f"    {line}" for line in lines)
            lines = [f"if others:\n        return others[0]({names})", f"try:\n    {tried}"]
            lines.append(f"except ResidencyError:\n        make_others()\n        return others[0]({names})")
        self.source = f"def run({names}):\n    " + "\n    ".join(lines) + "\n"
        exec(written_code(self.source, f"<rtkernels plan of {name}>"), scope)
        self.run = self.run_plain = scope["run"]
        if in_plain and steps.if_not_resident is None:
            plain = [in_plain.get(line, line) for line in lines]
            source = f"def run({names}):\n    " + "\n    ".join(plain) + "\n"
            exec(written_code(source, f"<rtkernels plain plan of {name}>"), scope)
            self.run_plain = scope["run"]

    def is_allocated(self, i: int) -> bool:
        """Return True if memory of its own is allocated for a result."""
        memory = [*self._made_of[3].values()][i]
        return memory is not None and not memory.fresh

    def with_layouts(self, layouts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> StepPlan:
        """Return this plan with other shapes, strides and dtypes of some results, in memory of the same size."""
        name, arguments, numbers, outputs, *rest = self._made_of
        changed = dict(outputs)
        for i, (shape, strides, dtype) in layouts.items():
            key = [*outputs][i]
            changed[key] = outputs[key]._replace(shape=shape, strides=strides, dtype=dtype)
        return StepPlan(name, arguments, numbers, changed, *rest)

    @staticmethod
    def _written(place: str, argument: Any, known: Mapping[str, str], scope: dict[str, Any]) -> str:
        if isinstance(argument, str):
            return known[argument]
        if isinstance(argument, Offset):
            return f"{known[argument.name]} + {argument.offset}"
        if isinstance(argument, Boxes):
            maps = scope[f"map_{place}"] = _Maps(argument)
            scope[f"kept_{place}"] = maps.kept.get  # a method of C, which nearly always has the map
            return f"(kept_{place}(address := {known[argument.name]}) or map_{place}(address))"
        scope[f"c_{place}"] = argument
        return f"c_{place}"


def _is_fixed(argument: Any, known: Mapping[str, str]) -> bool:
    return isinstance(argument, (int, float)) or (isinstance(argument, str) and known[argument] == "0")


def _fill_call(memory: Memory) -> str:
    return ".zero_()" if memory.zero else "" if memory.fill is None else f".fill_({memory.fill})"


class _Maps:
    """The tensor maps of one argument, by address: allocators give the same ones time and time over."""

    __slots__ = ("boxes", "kept")

    def __init__(self, boxes: Boxes) -> None:
        self.boxes, self.kept = boxes, {}

    def __call__(self, address: int) -> Any:
        """Make the map of an address that ``kept`` does not have."""
        b = self.boxes
        made = tiled_map(address + b.offset, b.token, b.sizes, b.strides, b.box, b.swizzle, b.promote)
        if not hasattr(address, "tensor"):  # in the emulator addresses are those of one call's tensors
            if len(self.kept) >= _MAPS_PER_STEP:
                self.kept.clear()
            self.kept[address] = made
        return made
