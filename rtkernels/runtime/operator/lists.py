"""Declared operators over lists of tensors: lists are looked up in address tables, and plans belong to a table.

Other operators look up plans by metadata. For a list, the metadata of one tensor says little, and kernels access the
tensors through a table on the device anyway (``runtime/launch/tables.py``). So each table, which belongs to certain
lists and addresses, keeps its plans. Schema, checks, fake, launch and version counting follow from the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.tables import Tables
from rtkernels.runtime.operator.aliasing import refuse_shared_lists
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.plan import Memory, StepPlan, Steps
from rtkernels.runtime.operator.written import written_code
from rtkernels.runtime.torch_private import dispatch_modes, forward_ad, increment_versions, is_dynamo_compiling


class Tensors:
    """A list of tensors, one of the lists of a table.

    Args:
        name: Its name in the schema and in messages.
        written: The operator overwrites the tensors.
        counted: Count their versions for autograd. False if no graph can have saved them.
        optional: May be empty; it is then left out of the table.
    """

    def __init__(self, name: str, *, written: bool = False, counted: bool = True, optional: bool = False) -> None:
        self.name, self.written, self.counted, self.optional = name, written, written and counted, optional


class Number:
    """A single float32 number on the device of the lists, or None. `called`: its name in messages."""

    written = False

    def __init__(self, name: str, called: str | None = None) -> None:
        self.name, self.called = name, called or name


def check_device_number(called: str, number: Tensor, like: Tensor) -> None:
    """Raise an ArgumentError unless a tensor is a single float32 number on the device of `like`."""
    if number.dtype != torch.float32 or number.numel() != 1:
        got = f"{str(number.dtype).removeprefix('torch.')} {tuple(number.shape)}"
        raise ArgumentError(f"{called} is a tensor of {got}; expected a single float32 number")
    if number.device != like.device:
        raise ArgumentError(f"{called} is on {number.device}; expected {like.device}, that of the tensors")


class ListOperator(TorchOp):
    """A declared operator over lists of tensors. An empty first list runs the reference.

    ``replay`` takes the same arguments. If lists with these addresses and metadata were used before, and no tensor
    requires a gradient, it runs that call's plan and returns its result, or True if it has none. Otherwise it returns
    None.

    Args:
        name: Name of the operator.
        arguments: ``Tensors``, then ``Number``.
        options: Its last arguments, as in a schema.
        numbers: Names of options that no plan depends on; steps refer to them by name, like tensors.
        derived: Names that steps use instead of `numbers`, and a function that computes their values from `numbers`.
        result: Name of the tensor it returns; empty for an operator that only overwrites.
        output: ``(*arguments) -> Memory`` of the result.
        tables: Returns the tables of its lists. A table has ``device``, ``address`` and a dict ``plans``.
        plan: ``(table, *options without numbers) -> Steps``, in which "table" is the table's address.
        reference: ``(*arguments)``: the same in plain torch, for checked arguments.
    """

    def __init__(
        self, name: str, arguments: Sequence[Tensors | Number], *, options: str, numbers: str = "",
        derived: tuple[str, Callable[..., tuple[float, ...]]] | None = None, result: str = "",
        output: Callable[..., Memory] | None = None, tables: Tables, plan: Callable[..., Steps],
        reference: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._lists = [a for a in arguments if isinstance(a, Tensors)]
        self._scalars = [a for a in arguments if isinstance(a, Number)]
        self._result, self._output, self._tables = result, output, tables
        self._make_steps, self._plain = plan, reference
        option_names = [option.split()[-1] for option in options.split(",")]
        self.names = (*(a.name for a in arguments), *option_names)
        self._numbers = tuple(numbers.split())
        self._kept = [option for option in option_names if option not in self._numbers]
        self._run_names, self._derive = (derived[0].split(), derived[1]) if derived else (self._numbers, None)
        letters = iter("abcdefgh")
        kinds = []
        for argument in arguments:
            alias = f"({next(letters)}!)" if argument.written else ""
            kinds.append(f"Tensor{alias}{'[]' if isinstance(argument, Tensors) else '?'} {argument.name}")
        schema = f"{name}({', '.join([*kinds, options])}) -> {'Tensor' if result else '()'}"
        written = self._write_out(name)
        self._listed, self._check_numbers = written["listed"], written["check_numbers"]
        super().__init__(schema, launch=written["launch"], reference=self._run_reference, fake=self._fake)
        self.replay = written["replay"]

    def _write_out(self, operator: str) -> dict[str, Any]:
        names, first = ", ".join(self.names), self._lists[0].name
        listed = ", ".join(f"*([{a.name}] if len({a.name}) else [])" if a.optional else a.name for a in self._lists)
        checks = [
            f"{a.name} is None or check_device_number({a.called!r}, {a.name}, {first}[0]); " for a in self._scalars
        ]
        pointers = [f"0 if {a.name} is None else {a.name}.data_ptr()" for a in self._scalars]
        numbers = f"*derive({', '.join(self._numbers)})" if self._derive else ", ".join(self._numbers)
        counted = ", ".join(f"*{a.name}" for a in self._lists if a.counted)
        count = f"{first}[0].is_inference() or increment_versions(({counted},)); " if counted else ""
        run = ", ".join(filter(None, ["table.address", *pointers, numbers]))
        lists = [f"type({a.name}) in plain_lists" for a in self._lists]
        source = f"""
def listed({names}):
    return {listed},

def check_numbers({names}):
    {"".join(checks)}return None

def launch({names}):
    {"".join(checks)}table = tables.find(({listed},))
    plan = table.plans.get(({", ".join([repr(operator), *self._kept])}))
    if plan is None:
        plan = table.plans[{", ".join([repr(operator), *self._kept])}] = make_plan(table, ({names},))
    returned = plan.run({run})
    {count}return returned

def replay({names}):
    if {" and ".join(lists)} and not is_dynamo_compiling() and forward_ad._current_level < 0 and not dispatch_modes():
        table = tables.known(({listed},))
        plan = None if table is None else table.plans.get(({", ".join([repr(operator), *self._kept])}))
        if plan is not None:
            {"".join(checks)}returned = plan.run({run})
            {count}return True if returned is None else returned
"""
        scope = {
            "tables": self._tables,
            "check_device_number": check_device_number,
            "make_plan": self._make_plan,
            "derive": self._derive,
            "increment_versions": increment_versions,
            "plain_lists": (list, tuple),
            "is_dynamo_compiling": is_dynamo_compiling,
            "forward_ad": forward_ad,
            "dispatch_modes": dispatch_modes,
        }
        exec(written_code(source, f"<rtkernels lists of {operator}>"), scope)
        return scope

    def _make_plan(self, table: Any, args: tuple[Any, ...]) -> StepPlan:
        given = dict(zip(self.names, args, strict=True))
        self._refuse_shared(given)
        steps = self._make_steps(table, *(given[option] for option in self._kept))
        outputs = {self._result: self._output(*args)} if self._result else {}
        names = ["table", *(a.name for a in self._scalars)]
        shape = "single" if self._result else "tuple"
        return StepPlan(self.name, names, self._run_names, outputs, shape, steps, table.device)

    def _refuse_shared(self, given: dict[str, Any]) -> None:
        refuse_shared_lists([(a.name, given[a.name], a.written) for a in self._lists])

    def _run_reference(self, *args: Any) -> Any:
        if len(args[0]):
            self._check_numbers(*args)
        self._tables.check(self._listed(*args))
        self._refuse_shared(dict(zip(self.names, args, strict=True)))
        return self._plain(*args)

    def _fake(self, *args: Any) -> Any:
        if not self._result:
            return None
        memory = self._output(*args)
        return args[0][0].new_empty(memory.shape, dtype=memory.dtype)
