"""How operators over lists of tensors find their plans: each table of addresses keeps its own.

Other operators look up plans by metadata. For a list, the metadata of one tensor says little, and kernels access the
tensors through a table on the device anyway (``runtime/launch/tables.py``), which belongs to certain lists and
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.invariance import LEVEL_CODE, LEVEL_SCOPE
from rtkernels.runtime.launch.tables import Tables
from rtkernels.runtime.operator.aliasing import refuse_shared_lists
from rtkernels.runtime.operator.plan import StepPlan
from rtkernels.runtime.torch_private import increment_versions


class Tensors:
    """An argument: a list of tensors, one of the lists of a table.

    Args:
        name: Its name in the schema and in messages.
        written: The operator overwrites the tensors.
        counted: Count their versions for autograd. False if no graph can have saved them.
        optional: May be empty; it is then left out of the table.
    """

    def __init__(self, name: str, *, written: bool = False, counted: bool = True, optional: bool = False) -> None:
        self.name, self.written, self.counted, self.optional = name, written, written and counted, optional


class Number:
    """An argument: a single float32 number on the device of the lists, or None. `called`: its name in messages."""

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


class Lists:
    """The lists among an operator's arguments, and the generated functions that find and run their plans.

    Args:
        operator: Its name.
        names: Names of all arguments.
        arguments: ``Tensors``, then ``Number``.
        numbers: Names of options that no plan depends on.
        derived: As for ``Operator``.
        tables: As for ``Operator``.
        make_plan: Returns the ``StepPlan`` of a table and the operator's arguments.
    """

    def __init__(
        self, operator: str, names: Sequence[str], arguments: Sequence[Tensors | Number], numbers: Sequence[str],
        derived: tuple[str, Callable[..., tuple[float, ...]]] | None, tables: Tables,
        make_plan: Callable[[Any, tuple[Any, ...]], StepPlan],
    ) -> None:  # fmt: skip
        self._lists = [a for a in arguments if isinstance(a, Tensors)]
        self._scalars = [a for a in arguments if isinstance(a, Number)]
        self._names, self._tables = names, tables
        self.run_names, self._derive = (derived[0].split(), derived[1]) if derived else (numbers, None)
        self.addresses = ["table", *(a.name for a in self._scalars)]
        given = {a.name for a in arguments}
        plan = ", ".join([repr(operator), *(n for n in names if n not in given and n not in numbers), LEVEL_CODE])
        first = self._lists[0].name
        listed = ", ".join(f"*([{a.name}] if len({a.name}) else [])" if a.optional else a.name for a in self._lists)
        checks = "".join(
            f"{a.name} is None or check_device_number({a.called!r}, {a.name}, {first}[0]); " for a in self._scalars
        )
        pointers = [f"0 if {a.name} is None else {a.name}.data_ptr()" for a in self._scalars]
        values = f"*derive({', '.join(numbers)})" if derived else ", ".join(numbers)
        counted = ", ".join(f"*{a.name}" for a in self._lists if a.counted)
        count = f"{first}[0].is_inference() or increment_versions(({counted},)); " if counted else ""
        run = f"plan.run({', '.join(filter(None, ['table.address', *pointers, values]))})"
        self.source = f"""
def check_lists({", ".join(names)}):
    if len({first}):
        {checks}pass
    tables.check(({listed},))

def launch({", ".join(names)}):
    {checks}table = tables.find(({listed},))
    plan = table.plans.get(({plan},))
    if plan is None:
        plan = table.plans[{plan},] = make_plan(table, ({", ".join(names)},))
    returned = {run}
    {count}return returned
"""
        # The lines of a call that run the plan of lists which were used before, and of which none requires a gradient.
        self.known_lines = f"""\
    if {" and ".join(f"type({a.name}) in plain_lists" for a in self._lists)} and not is_dynamo_compiling() \\
            and forward_ad._current_level < 0 and not dispatch_modes():
        table = tables.known(({listed},))
        plan = None if table is None else table.plans.get(({plan},))
        if plan is not None:
            {checks}returned = {run}
            {count}return returned
"""
        self.scope = {
            "tables": tables,
            "check_device_number": check_device_number,
            "make_plan": make_plan,
            "derive": self._derive,
            "increment_versions": increment_versions,
            "plain_lists": (list, tuple),
            **LEVEL_SCOPE,
        }

    def refuse_shared(self, args: Sequence[Any]) -> None:
        """Raise an ArgumentError if tensors that are overwritten share memory with others."""
        given = dict(zip(self._names, args, strict=True))
        refuse_shared_lists([(a.name, given[a.name], a.written) for a in self._lists])
