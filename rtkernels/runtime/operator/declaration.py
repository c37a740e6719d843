"""``Declared``: one declaration says what the arguments must be and what the results look like.

The schema, the key of a plan, copies of tensors with unsupported strides, allocation, the fake and empty results are
derived from it. ``declared.py`` has the two kinds: operators and primitives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.depends import meta_code, option_code
from rtkernels.runtime.invariance import LEVEL_CODE, LEVEL_SCOPE, level, refuse
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.launch.tables import Tables
from rtkernels.runtime.layout import check_same, overlaps_itself
from rtkernels.runtime.operator.aliasing import guards_of, refuse_shared
from rtkernels.runtime.operator.arguments import check_boolean
from rtkernels.runtime.operator.by_name import by_name
from rtkernels.runtime.operator.kinds import Argument, Meta, is_vectorised, meta_of
from rtkernels.runtime.operator.lists import Lists, Number, Tensors
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, StepPlan, Steps
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import increment_versions, without_autocast

Planned = StepPlan | Steps | None  # ``Steps`` where plain torch or other operators compute; None: copies come first
active_traces: list[Any] = []  # ``trace.Trace`` of all threads


def own_trace() -> Any:
    """Return the active trace of this thread, unless it records the current operator as a whole."""
    thread = threading.get_ident()
    others = tuple(active_traces)  # other threads may remove theirs at any time
    return next((trace for trace in others if trace.thread == thread and not trace.inside), None)


class Declared:
    """Check, plan and run, for ``Operator`` and ``Primitive``."""

    def __init__(
        self, name: str, arguments: Sequence[Argument | Tensors | Number | str], *, options: str = "",
        numbers: str = "", results: str | None, outputs: Callable[..., Any] | None = None, plan: Callable[..., Steps],
        reference: Callable[..., Any] | None, check: Callable[..., None] | None = None,
        check_numbers: Callable[..., None] | None = None, prepare: Callable[..., tuple[Any, ...]] | None = None,
        plans_empty: bool = False, counts_versions: bool = True, tables: Tables | None = None,
        derived: tuple[str, Callable[..., tuple[float, ...]]] | None = None,
        not_invariant: tuple[int, str] | None = None,
    ) -> None:  # fmt: skip
        """Declare ``torch.ops.rtkernels.<name>``.

        Below, `values` are the operator's arguments with a ``Meta`` (or None) in place of each tensor. Functions get
        the values or arguments that their parameters name, and the device, or a NamedTuple of them (``by_name``).

        Args:
            name: Name of the operator.
            arguments: Its tensors; options between them as in a schema, ``"SymInt rows"``. Or ``Tensors``, then
                ``Number``, for an operator over lists.
            options: Its last arguments, as in a schema: ``"float eps, bool log"``.
            numbers: Names of options that no plan depends on; steps refer to them by name, like tensors. For numbers
                that change from call to call: there is a plan for each value of every other option.
            results: Names of the tensors it returns, ``"y rstd"``; empty for an operator that only overwrites; None for
                a list of tensors, named by `outputs`.
            outputs: ``(*values) -> (Memory, ...)``, one for each result, None for one that was not requested; for a
                list, a dictionary of Memory by name.
            plan: ``(*values without numbers, device) -> Steps``. Called only if there is something to compute, and
                only with tensors that fit.
            reference: ``(*arguments)``: the same in plain torch, on any device.
            check: ``(*values)``: raises an ArgumentError for what the declaration cannot express.
            check_numbers: ``(*numbers)``: raises an ArgumentError for unsupported numbers.
            prepare: ``(*arguments) -> arguments``, called in every call, for what depends on addresses: copies
                tensors, or raises an ArgumentError for shared memory. Such operators are not replayed. Over lists it
                is called unless the lists were used before and none of their tensors requires a gradient.
            plans_empty: Call `plan` for empty tensors, too. Otherwise the reference computes non-empty results of
                empty tensors, and empty results need no computation.
            counts_versions: Tell autograd what is overwritten. False if the caller has done so.
            tables: For lists: returns their table, which has ``device``, ``address`` and a dict ``plans``. `plan` gets
                the "table" instead of values, and "table" in its steps is the table's address.
            derived: For lists: names that steps use instead of `numbers`, and a function that computes their values
                from `numbers`.
            not_invariant: The level of batch invariance from which calls raise, and why.
        """
        declared = [*arguments, *(part.strip() for part in options.split(",") if part.strip())]
        self.name, self.counts_versions, self.not_invariant = name, counts_versions, not_invariant
        self.arguments = tuple(a for a in declared if isinstance(a, Argument))
        self.names = tuple(a.split("=")[0].split()[-1] if isinstance(a, str) else a.name for a in declared)
        self._option_types = {n: a.split()[0] for n, a in zip(self.names, declared, strict=True) if isinstance(a, str)}
        self.option_names = tuple(self._option_types)
        self.results = None if results is None else tuple(results.split())
        self._shape = "list" if self.results is None else "single" if len(self.results) == 1 else "tuple"
        self._numbers = tuple(numbers.split())
        self._written = [argument.name for argument in self.arguments if argument.written]
        self._counted = [f"{x} is None or {x}.is_inference() or increment_versions(({x},))" for x in self._written]
        known = [name for name in (self.names if tables is None else self.option_names) if name not in self._numbers]
        self._make_steps = by_name(plan, [*known, "device"] if tables is None else ["table", *known])
        self._outputs, self._check_all = (function and by_name(function, self.names) for function in (outputs, check))
        self._written_reference = reference and by_name(reference, self.names)
        self._check_numbers, self._prepare, self._plans_empty = check_numbers, prepare, plans_empty
        self._kinds = tuple(a if isinstance(a, Argument) else None for a in declared)
        self._booleans = tuple(n for n, kind in self._option_types.items() if kind == "bool")
        self._places = tuple(i for i, kind in enumerate(self._kinds) if kind is not None)
        self.written_places = tuple(i for i in self._places if self._kinds[i].written)
        self._number_places = tuple(self.names.index(number) for number in self._numbers)
        several = f"({', '.join(['Tensor'] * len(self.results or ()))})"
        returned = {"list": "Tensor[]", "single": "Tensor", "tuple": several}[self._shape]
        self.schema = f"{name}({', '.join(_schema_types(declared))}) -> {returned}"
        self._plans, self.lists = Plans(self._build), None
        if tables is not None:
            self.lists = Lists(name, self.names, arguments, self._numbers, derived, tables, self._build_listed)
        self._generated = self._generate()
        self._find, self.launch = self._generated.get("find"), self._generated["launch"]

    # What a plan depends on: everything except addresses and numbers.

    def _key(self) -> str:
        """Return the expression that looks up the plan of a call; its key consists of plain tuples."""
        keys, told_apart = [], []
        for name, kind in zip(self.names, self._kinds, strict=True):
            if kind is None:
                keys += [] if name in self._numbers else [name]
                code = option_code(name, self._option_types[name])
                told_apart += [] if name in self._numbers or code == name else [code]
                continue
            meta = f"({meta_code(name)})"
            keys.append(f"None if {name} is None else {meta}" if kind.optional else meta)
        return f"plans[{', '.join([*keys, *told_apart, LEVEL_CODE])},]"  # ``_build`` does not look at the last ones

    def _generate(self) -> dict[str, Any]:
        """Generate ``find`` and ``launch`` with a parameter for each argument, as ``TorchOp.call`` is.

        ``find`` returns the plan of a call and builds it if needed. ``launch`` runs it. All other cases (tensors that
        must be copied or converted, or plans without launches) are left to ``_launch_prepared``.
        """
        if self.lists is not None:
            return generated(self.lists.source, f"<rtkernels lists of {self.name}>", dict(self.lists.scope))
        names = ", ".join(self.names)
        checks = f"check_numbers({', '.join(self._numbers)})\n    " if self._check_numbers else ""
        prepare = f"{names} = prepare({names})\n    " if self._prepare else ""
        given = [self._address(name, kind) for name, kind in zip(self.names, self._kinds, strict=True) if kind]
        counted = "".join(f"{line}\n        " for line in self._counted) if self.counts_versions else ""
        source = f"""
def find({names}):
    {checks}return {self._key()}

def launch({names}):
    if active_traces and (trace := own_trace()) is not None:
        return trace.launched(operator, ({names},))
    {prepare}{checks}plan = {self._key()}
    if type(plan) is StepPlan and not plan.converted:
        returned = plan.run({", ".join([*given, *self._numbers])})
        {counted}return returned
    return launch_prepared(({names},), plan)
"""
        scope = {
            "plans": self._plans,
            "check_numbers": self._check_numbers,
            "prepare": self._prepare,
            "StepPlan": StepPlan,
            "increment_versions": increment_versions,
            "launch_prepared": self._launch_prepared,
            "active_traces": active_traces,
            "own_trace": own_trace,
            "operator": self,
            **LEVEL_SCOPE,
        }
        return generated(source, f"<rtkernels plans of {self.name}>", scope)

    @staticmethod
    def _address(name: str, kind: Argument) -> str:
        return f"0 if {name} is None else {name}.data_ptr()" if kind.optional else f"{name}.data_ptr()"

    def values(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments with a Meta for each tensor, as if its address were a multiple of 16."""
        return tuple(a if kind is None else meta_of(a) for kind, a in zip(self._kinds, args, strict=True))

    def check(self, *values: Any) -> None:
        """Raise an ArgumentError for metas and options that are unsupported or do not go together."""
        given = dict(zip(self.names, values, strict=True))
        for name in self._booleans:
            check_boolean(name, given[name])
        if self.not_invariant is not None and level() >= self.not_invariant[0]:
            refuse(self.name, self.not_invariant[1])
        for argument in self.arguments:
            argument.check(given)
            meta = given[argument.name]
            if argument.written and meta is not None and 0 not in meta.shape:
                if overlaps_itself(meta.shape, meta.stride):
                    raise ArgumentError(
                        f"{argument.name} has strides {tuple(meta.stride)} for shape {tuple(meta.shape)}; expected "
                        f"memory of its own for every element"
                    )
        if self._check_all is not None:
            self._check_all(*values)
        there = [argument.name for argument in self.arguments if given[argument.name] is not None]
        for name in there[1:]:
            check_same(name, given[name].device, given[there[0]].device, "device index", of=there[0])

    def _memory(self, values: Sequence[Any]) -> dict[str, Memory | None]:
        if self.results is None:
            return self._outputs(*values)
        return dict(zip(self.results, self._outputs(*values), strict=True)) if self.results else {}

    def _build(self, *key: Any) -> Planned:
        keys = iter(key)
        values = []
        for name, kind in zip(self.names, self._kinds, strict=True):
            value = None if name in self._numbers else next(keys)
            values.append(value if kind is None or value is None else Meta(*value))
        self.check(*values)
        given = dict(zip(self.names, values, strict=True))
        there = [(kind, given[kind.name]) for kind in self.arguments if given[kind.name] is not None]
        if not all(self._fits(kind, meta) for kind, meta in there):
            return None
        device = there[0][1].device
        outputs = self._memory(values)
        targets = [memory for memory in outputs.values() if memory is not None]
        targets += [meta for kind, meta in there if kind.written]
        if not self._plans_empty and all(0 in memory.shape for memory in targets):
            steps = Steps()
        elif not self._plans_empty and any(0 in meta.shape for _, meta in there):
            steps = IN_TORCH
        else:
            known = [value for name, value in zip(self.names, values, strict=True) if name not in self._numbers]
            steps = self._make_steps(*known, device)
        if steps is IN_TORCH or steps.instead is not None:
            return steps
        names = [argument.name for argument in self.arguments]
        absent = [name for name in names if given[name] is None]
        guards = guards_of(self.arguments, given)
        return StepPlan(self.name, names, self._numbers, outputs, self._shape, steps, device, absent, guards)

    def _build_listed(self, table: Any, args: tuple[Any, ...]) -> StepPlan:
        """Return the plan of a call over lists, which their table keeps."""
        self.lists.refuse_shared(args)
        given = dict(zip(self.names, args, strict=True))
        steps = self._make_steps(table, *(given[name] for name in self.option_names if name not in self._numbers))
        names, numbers = self.lists.addresses, self.lists.run_names
        return StepPlan(self.name, names, numbers, self._memory(args), self._shape, steps, table.device)

    def _copy_unfit(self, *args: Any) -> tuple[Any, ...]:
        copied = list(args)
        for i, value in enumerate(self.values(*args)):
            if not isinstance(value, Meta):
                continue
            kind, value = self._kinds[i], value._replace(misaligned=args[i].data_ptr() & 15)
            if not kind.fits(value):
                copied[i] = kind.copied(args[i])
            elif not self._fits(kind, value):
                copied[i] = args[i].clone(memory_format=torch.contiguous_format)
        return tuple(copied)

    @staticmethod
    def _fits(kind: Argument, meta: Meta) -> bool:
        """Return False for a tensor that must be copied; with batch invariance alignment must not choose a kernel."""
        return kind.fits(meta) and (not level() or kind.written or is_vectorised(meta))

    # Running a call.

    def _planned(self, args: tuple[Any, ...], plan: Planned = None) -> tuple[Planned, tuple[Any, ...]]:
        if self._written:
            self._refuse_shared(args)
        plan = plan or self._find(*args)
        if plan is None:
            args = self._copy_unfit(*args)
            plan = self._find(*args)
        if plan.converted:
            args = list(args)
            for name, how in plan.converted.items():
                i = self.names.index(name)
                converted = how(args[i]) if callable(how) else args[i].to(how).contiguous()
                # Plans rely on newly allocated, aligned memory (``dense_as``). A tensor that needed no conversion is
                # the caller's and may be misaligned.
                args[i] = converted.clone() if converted.data_ptr() & 15 else converted
            args = tuple(args)
        return plan, args

    def _refuse_shared(self, args: Sequence[Any]) -> None:
        """Raise an ArgumentError if an argument that is overwritten shares memory with another one."""
        given = [(kind, args[i]) for i, kind in enumerate(self._kinds) if kind is not None and args[i] is not None]
        for i, (kind, tensor) in enumerate(given):
            if kind.written:
                others = [(k.name, t) for j, (k, t) in enumerate(given) if j > i or (j < i and not k.written)]
                refuse_shared(kind.name, tensor, others, kind.over)

    def _launch_prepared(self, args: tuple[Any, ...], plan: Planned = None) -> Any:
        return self._run_planned(*self._planned(args, plan), args)

    def _run_planned(self, plan: Planned, used: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if type(plan) is Steps:
            with without_autocast("cuda" if used[self._places[0]].is_cuda else "cpu"):
                results = self._written_reference(*used) if plan is IN_TORCH else plan.instead(*used)
        else:
            results = plan.run(*self._addresses(used), *[args[i] for i in self._number_places])
        for i in self.written_places:
            if used[i] is not args[i]:
                args[i].copy_(used[i])
        self._count_versions(args)
        return results

    def _addresses(self, args: tuple[Any, ...]) -> list[int]:
        return [0 if args[i] is None else args[i].data_ptr() for i in self._places]

    def _count_versions(self, args: tuple[Any, ...]) -> None:
        for i in self.written_places if self.counts_versions else ():
            if args[i] is not None and not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])

    def _run_reference(self, *args: Any) -> Any:
        if self.lists is not None:
            self._generated["check_lists"](*args)
            self.lists.refuse_shared(args)
            return self._written_reference(*args)
        self.check(*self.values(*args))
        if self._check_numbers is not None:
            self._check_numbers(*[args[i] for i in self._number_places])
        if self._prepare is not None:
            args = self._prepare(*args)
        if self._written:
            self._refuse_shared(args)
        return self._written_reference(*args)

    def _fake(self, *args: Any) -> Any:
        first = args[self._places[0]] if self.lists is None else args[0][0]
        results = []
        for memory in self._memory(self.values(*args)).values():
            if memory is None:
                results.append(first.new_empty(0, dtype=torch.float32))
            elif memory.strides is None:
                results.append(first.new_empty(memory.shape, dtype=memory.dtype))
            else:
                results.append(first.new_empty_strided(memory.shape, memory.strides, dtype=memory.dtype))
        if self.results is None:
            return results
        return None if not results else results[0] if len(results) == 1 else tuple(results)


def _schema_types(declared: Sequence[Argument | Tensors | Number | str]) -> Iterator[str]:
    """Yield the arguments of a declaration as a schema spells them."""
    letters = iter("abcdefgh")
    for a in declared:
        if isinstance(a, str):
            yield a
            continue
        alias = f"({next(letters)}!)" if a.written else ""
        suffix = "[]" if isinstance(a, Tensors) else "?" if isinstance(a, Number) or a.optional else ""
        yield f"Tensor{alias}{suffix} {a.name}"
