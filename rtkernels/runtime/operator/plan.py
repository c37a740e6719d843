"""Plans: what a call does, computed from everything except the addresses of its tensors (see ``TorchOp``).

A ``StepPlan`` is a list of launches and the memory that they share. Its ``run`` is generated from that list, so that a
launch takes one Python call and no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ResidencyError
from rtkernels.runtime.launch.driver import Launch, no_blocks
from rtkernels.runtime.launch.memory import (
    allocator,
    dense_strides,
    fresh_zeros,
    kept_zeros,
    zero_words,
    zero_words_for,
)
from rtkernels.runtime.launch.tensor_map import tiled_map
from rtkernels.runtime.operator.aliasing import Guard, guard_lines
from rtkernels.runtime.operator.written import generated

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "byte": 1}
_PARTS = ("shape", "strides", "dtype")  # of a layout
_MAPS_PER_STEP = 256  # tensor maps cached per argument


class Memory(NamedTuple):
    """A tensor that a call allocates: a result, or scratch. Dense unless it has `strides`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    zero: bool = False  # cleared first
    fill: float | None = None  # filled with this number first
    fresh: bool = False  # one-dimensional int32 zeros that need no launch (``memory.fresh_zeros``)

    @property
    def is_plain(self) -> bool:
        """True if uninitialised and non-empty."""
        return not self.zero and self.fill is None and not self.fresh and 0 not in self.shape

    @classmethod
    def like(cls, tensor: Any) -> Memory:
        """Return dense memory with the shape and dtype of a tensor or of a ``Meta``."""
        return cls(tensor.shape, tensor.dtype)


class Boxes(NamedTuple):
    """A kernel argument: the tensor map of an argument, a result or scratch. Fields as for ``tensor_map.tiled_map``."""

    name: str
    token: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: bool | int = True
    promote: bool = True
    offset: int = 0  # bytes from the tensor's first element


def matrix_boxes(
    name: str, token: str, rows: int, cols: int, pitch: int, box_rows: int, box_cols: int, **more: Any
) -> Boxes:
    """Return the tensor map of a row-major matrix, `pitch` elements from row to row, for boxes of at most 256 rows."""
    return Boxes(name, token, (cols, rows), (pitch * ITEM_BYTES[token],), (box_cols, box_rows), **more)


def box_strides(sizes: Sequence[int], steps: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the strides of a tensor map in bytes.

    A stride of 0 stays 0: all entries of an expanded dimension are the same. The stride of a dimension with one entry
    is never used, and is replaced by a multiple of 16 bytes, which TMA requires.

    Args:
        sizes: Elements in each dimension, the contiguous one first.
        steps: Elements from one entry to the next in each dimension but the first.
        size: Bytes of an element.
    """
    row = -(-sizes[0] * size // 16) * 16
    return tuple(step * size if n > 1 else row for step, n in zip(steps, sizes[1:], strict=True))


class Offset(NamedTuple):
    """A kernel argument: the address `offset` bytes after the first element of a tensor."""

    name: str
    offset: int


class Step:
    """One launch of a plan.

    Args:
        launch: The result of ``Kernel.bind``.
        arguments: Arguments of the kernel, in order: the name of a tensor (passed by address, 0 if absent) or of a
            number of the call, ``Boxes``, ``Offset``, or a number. Numbers, and zeros for absent tensors, are packed
            only once.
    """

    __slots__ = ("arguments", "launch")

    def __init__(self, launch: Launch, *arguments: str | int | float | Boxes | Offset) -> None:
        self.launch, self.arguments = launch, arguments


class Steps:
    """The result of a declared operator's ``plan``: consecutive launches and the memory they share.

    Args:
        steps: The launches; those without blocks are left out. Without any, results stay as allocated.
        scratch: Memory that is freed after the call, by name.
        zeros: Number of int32 zeros, cleared for this call, for the argument of this name.
        kept: Tensors that the plan uses in every call, by name.
        before: Called before the launches of every call.
        after: Called after them.
        kept_zeros: Number of int32 zeros for the argument of this name, which kernels leave as zeros.
        if_not_resident: Returns other steps, for a device that refuses a launch whose blocks must all be resident.
        converted: Arguments that are converted first: to a dtype, and to dense memory, or by a function.
        instead: A function of the operator's arguments that calls other operators instead of launching.
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
        self.steps = tuple(step for step in steps if step.launch is not no_blocks)
        self.scratch, self.zeros = dict(scratch or {}), dict(zeros or {})
        self.converted, self.instead, self.if_not_resident = converted, instead, if_not_resident
        self.kept_zeros, self.kept, self.before, self.after = dict(kept_zeros or {}), dict(kept or {}), before, after


IN_TORCH = Steps()  # instead of launches: the reference computes this call, on its device


class _Spec(NamedTuple):
    """What a ``StepPlan`` is built from; see there."""

    name: str
    arguments: Sequence[str]
    numbers: Sequence[str]
    outputs: Mapping[str, Memory | None]
    returned: str
    steps: Steps
    device: int
    absent: Collection[str]
    guards: Sequence[Guard]


class StepPlan:
    """A plan: launches of one call of an operator, which can be repeated.

    ``run`` is generated from the steps. It takes the addresses of the operator's tensors, 0 for None, and numbers; it
    allocates results, launches, and returns them.

    Args:
        name: Name of the operator, for tracebacks.
        arguments: Names of the operator's tensors, in the order of its schema.
        numbers: Names of the numbers that follow the addresses.
        outputs: Results by name, in the order in which they are returned; None for one that was not requested.
        returned: How results are returned: a "single" tensor, a "tuple" or a "list".
        steps: The result of the operator's ``plan``.
        device: CUDA ordinal, or -1.
        absent: Arguments that are None in all calls of this plan.
        guards: Arguments that must not share memory; ``run`` compares their addresses first.
    """

    __slots__ = ("_launches", "_spec", "converted", "matches", "run", "source", "steps")

    def __init__(
        self, name: str, arguments: Sequence[str], numbers: Sequence[str], outputs: Mapping[str, Memory | None],
        returned: str, steps: Steps, device: int, absent: Collection[str] = (), guards: Sequence[Guard] = (),
    ) -> None:  # fmt: skip
        self.matches: Callable[..., bool] | None = None  # compares tensors with those of this plan
        self.converted, self.steps = steps.converted, steps.steps
        self._spec = _Spec(name, arguments, numbers, outputs, returned, steps, device, absent, guards)
        allocated = self.memory()
        if both := {*arguments, *numbers} & {*allocated, *steps.scratch}:
            raise ValueError(f"{name}: {', '.join(both)} is the name of two tensors")
        self._launches = self._fixed_launches()
        scope: dict[str, Any] = {"ResidencyError": ResidencyError, "fresh_zeros": fresh_zeros}
        allocations: list[str] = []
        for variable, memory in allocated.items():
            layout = layout_of(memory)
            scope |= {f"{part}_{variable}": value for part, value in zip(_PARTS, layout, strict=True)}
            source = f"allocate(shape_{variable}, strides_{variable}, dtype_{variable})"
            source = f"fresh_zeros({device}, {memory.shape[0]})" if memory.fresh else source
            allocations.append(f"t_{variable} = {source}{fill_call(memory)}")
        given = {argument: f"p_{argument}" for argument in arguments} | {number: number for number in numbers}
        where = {variable: f"t_{variable}.data_ptr()" for variable in allocated}
        for variable in (variable for variable in allocated if self.uses(variable) > 1):
            allocations.append(f"p_{variable} = {where[variable]}")
            where[variable] = f"p_{variable}"
        lines = [*guard_lines(guards, scope), *allocations, *self.launch_lines("", given | where, scope)]
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
                StepPlan(*self._spec._replace(steps=steps.if_not_resident())).run
            )
            tried = "\n    ".join(f"    {line}" for line in lines)
            lines = [f"if others:\n        return others[0]({names})", f"try:\n    {tried}"]
            lines.append(f"except ResidencyError:\n        make_others()\n        return others[0]({names})")
        self.source = f"def run({names}):\n    " + "\n    ".join(lines) + "\n"
        self.run = generated(self.source, f"<rtkernels plan of {name}>", scope)["run"]

    @property
    def arguments(self) -> Sequence[str]:
        """Names of the operator's tensors, and then of its numbers."""
        return [*self._spec.arguments, *self._spec.numbers]

    @property
    def results(self) -> Sequence[str]:
        """Names of its results."""
        return [*self._spec.outputs]

    @property
    def is_straight(self) -> bool:
        """Whether other functions may inline it (``launch_lines``)."""
        return self._spec.steps.if_not_resident is None

    def memory(self) -> dict[str, Memory]:
        """Return the memory it allocates by name, results first; results that were not requested are empty."""
        outputs, steps = self._spec.outputs, self._spec.steps
        return {name: memory or Memory((0,), torch.float32) for name, memory in outputs.items()} | steps.scratch

    def uses(self, name: str) -> int:
        """Return how many arguments of launches are the address of a tensor."""
        names = [getattr(a, "name", a) for step in self.steps for a in step.arguments]
        return 0 if name in self._absent() else names.count(name)

    def _absent(self) -> set[str]:
        """Return the names whose address is 0 in all calls."""
        return {*self._spec.absent, *(name for name, memory in self._spec.outputs.items() if memory is None)}

    def _fixed_launches(self) -> list[tuple[Launch, list[Any]]]:
        """Return the launches, with arguments that never change already fixed, and the remaining arguments."""
        absent, found = self._absent(), []
        for step in self.steps:
            fixed = {
                j: 0 if isinstance(a, str) else a
                for j, a in enumerate(step.arguments)
                if isinstance(a, (int, float)) or a in absent
            }
            fixed = fixed if hasattr(step.launch, "with_fixed") else {}
            given = [a for j, a in enumerate(step.arguments) if j not in fixed]
            given = [_Maps(a) if isinstance(a, Boxes) else 0 if a in absent else a for a in given]
            found.append((step.launch.with_fixed(fixed) if fixed else step.launch, given))
        return found

    def launch_lines(self, prefix: str, known: Mapping[str, str], scope: dict[str, Any]) -> list[str]:
        """Return the lines that launch.

        Args:
            prefix: Prefix of all other names in the lines.
            known: Expressions for the addresses of arguments, results and scratch, and for numbers.
            scope: Receives the objects that the lines refer to.
        """
        steps, device = self._spec.steps, self._spec.device
        scope |= {"allocate": allocator(device), "zero_words": zero_words, "kept_zeros": kept_zeros}
        known, lines = dict(known) | dict.fromkeys(self._absent(), "0"), []
        if steps.before is not None:
            scope[f"before_{prefix}"] = steps.before
            lines.append(f"before_{prefix}()")
        for variable, count in steps.zeros.items():
            known[variable] = f"p_{prefix}{variable}"
            count = zero_words_for(device, count)
            lines.append(f"t_{prefix}{variable}, p_{prefix}{variable} = zero_words({device}, {count})")
        for variable, count in steps.kept_zeros.items():
            lines.append(f"t_{prefix}{variable} = kept_zeros({device}, {count})")
            known[variable] = f"t_{prefix}{variable}.data_ptr()"
        for variable, tensor in steps.kept.items():
            scope[f"t_{prefix}{variable}"] = tensor
            known[variable] = f"t_{prefix}{variable}.data_ptr()"
        for i, (launch, arguments) in enumerate(self._launches):
            scope[f"launch_{prefix}{i}"] = launch
            written = [_written(f"{prefix}{i}_{j}", a, known, scope) for j, a in enumerate(arguments)]
            lines.append(f"launch_{prefix}{i}({', '.join(written)})")
        if steps.after is not None:
            scope[f"after_{prefix}"] = steps.after
            lines.append(f"after_{prefix}()")
        return lines

    def is_asked_for(self, name: str) -> bool:
        """Return True for scratch, and for a result that was requested."""
        return self._spec.outputs.get(name, True) is not None

    def is_allocated(self, i: int) -> bool:
        """Return True if a result is allocated separately."""
        memory = [*self._spec.outputs.values()][i]
        return memory is not None and not memory.fresh

    def with_layouts(self, layouts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> StepPlan:
        """Return this plan with other shapes, strides and dtypes of some results, in memory of the same size."""
        outputs = dict(self._spec.outputs)
        for i, (shape, strides, dtype) in layouts.items():
            key = self.results[i]
            outputs[key] = outputs[key]._replace(shape=shape, strides=strides, dtype=dtype)
        return StepPlan(*self._spec._replace(outputs=outputs))


def layout_of(memory: Memory) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return shape, strides and dtype in the form that allocators take."""
    strides = dense_strides(memory.shape) if memory.strides is None else tuple(memory.strides)
    return tuple(memory.shape), strides, memory.dtype


def _written(place: str, argument: Any, known: Mapping[str, str], scope: dict[str, Any]) -> str:
    """Return the expression for an argument of a launch."""
    if isinstance(argument, str):
        return known[argument]
    if isinstance(argument, Offset):
        return f"{known[argument.name]} + {argument.offset}"
    if isinstance(argument, _Maps):
        scope[f"map_{place}"] = argument
        scope[f"kept_{place}"] = argument.kept.get  # a C method, which nearly always finds the map
        address = known[argument.boxes.name]
        if address.isidentifier():
            return f"(kept_{place}({address}) or map_{place}({address}))"
        return f"(kept_{place}(address := {address}) or map_{place}(address))"
    scope[f"c_{place}"] = argument
    return f"c_{place}"


def fill_call(memory: Memory) -> str:
    """Return the method call that initialises newly allocated memory, or ""."""
    return ".zero_()" if memory.zero else "" if memory.fill is None else f".fill_({memory.fill})"


class _Maps:
    """The tensor maps of one argument, by address: allocators return the same addresses repeatedly."""

    __slots__ = ("boxes", "kept")

    def __init__(self, boxes: Boxes) -> None:
        self.boxes, self.kept = boxes, {}

    def __call__(self, address: int) -> Any:
        """Encode the map of an address that is not in ``kept``."""
        b = self.boxes
        encoded = tiled_map(address + b.offset, b.token, b.sizes, b.strides, b.box, b.swizzle, b.promote)
        if not hasattr(address, "tensor"):  # in the emulator, an address belongs to a tensor of one call
            if len(self.kept) >= _MAPS_PER_STEP:
                self.kept.clear()
            self.kept[address] = encoded
        return encoded
