"""Declared operators: one declaration says what the arguments must be and what the results look like.

The schema, the key of a plan, copies of tensors with unsupported strides, allocation, the fake, empty results and
replay are derived from it. ``kinds.py`` defines the kinds of arguments, which this module re-exports; ``lists.py``
handles lists of tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.depends import meta_code, option_code
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import check_same, overlaps_itself
from rtkernels.runtime.operator.aliasing import guards_of, refuse_shared
from rtkernels.runtime.operator.arguments import check_boolean
from rtkernels.runtime.operator.by_name import by_name
from rtkernels.runtime.operator.kinds import (
    Aligned,
    Argument,
    Dense,
    DenseFloat,
    Exact,
    InPlace,
    InPlaceAligned,
    InPlaceDense,
    InPlaceExact,
    InPlaceRows,
    InPlaceVectors,
    Meta,
    OwnRows,
    Rows,
    UnitStride,
    dense_as,
    misaligned,
)
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Plan, StepPlan, Steps
from rtkernels.runtime.operator.written import written_code

__all__ = [
    "Aligned",
    "Argument",
    "Declared",
    "Dense",
    "DenseFloat",
    "Exact",
    "InPlace",
    "InPlaceAligned",
    "InPlaceDense",
    "InPlaceExact",
    "InPlaceOperator",
    "InPlaceRows",
    "InPlaceVectors",
    "Internal",
    "Meta",
    "Operator",
    "OwnRows",
    "Rows",
    "UnitStride",
    "dense_as",
    "misaligned",
]


active_traces: list[Any] = []  # ``trace.Trace`` of all threads


def own_trace() -> Any:
    """Return the active trace of this thread, unless it records the current operator as a whole."""
    thread = threading.get_ident()
    others = tuple(active_traces)  # other threads may remove theirs at any time
    return next((trace for trace in others if trace.thread == thread and not trace.inside), None)


class Declared:
    """What ``Operator`` and ``InPlaceOperator`` share."""

    counts_versions = True  # False: the caller counts the versions of what it overwrites

    def __init__(
        self, name: str, arguments: Sequence[Argument | str], *, options: str = "", numbers: str = "",
        results: str | None, outputs: Callable[..., Any] | None = None, plan: Callable[..., Steps],
        reference: Callable[..., Any], check: Callable[..., None] | None = None,
        check_numbers: Callable[..., None] | None = None, prepare: Callable[..., tuple[Any, ...]] | None = None,
        plans_empty: bool = False,
    ) -> None:  # fmt: skip
        """Declare ``torch.ops.rtkernels.<name>``.

        Below, `values` are the operator's arguments with a ``Meta`` (or None) in place of each tensor. Functions get
        the values or arguments that their parameters name, and the device, or a NamedTuple of them (``by_name``).

        Args:
            name: Name of the operator.
            arguments: Its tensors; options between them as in a schema, ``"SymInt rows"``.
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
                tensors, or raises an ArgumentError for shared memory. Such operators are not replayed.
            plans_empty: Call `plan` for empty tensors, too. Otherwise the reference computes non-empty results of
                empty tensors, and empty results need no computation.
        """
        declared = [*arguments, *(part.strip() for part in options.split(",") if part.strip())]
        self.arguments = tuple(a for a in declared if isinstance(a, Argument))
        self.names = tuple(a.name if isinstance(a, Argument) else a.split("=")[0].split()[-1] for a in declared)
        self._option_types = {n: a.split()[0] for n, a in zip(self.names, declared, strict=True) if isinstance(a, str)}
        self.results = None if results is None else tuple(results.split())
        self._numbers = tuple(numbers.split())
        self._written = [argument.name for argument in self.arguments if argument.written]
        known = [name for name in self.names if name not in self._numbers]
        self._make_steps = by_name(plan, [*known, "device"])
        self._outputs, self._check_all = (function and by_name(function, self.names) for function in (outputs, check))
        self._written_reference = reference and by_name(reference, self.names)
        self._check_numbers, self._prepare, self._plans_empty = check_numbers, prepare, plans_empty
        self._kinds = tuple(a if isinstance(a, Argument) else None for a in declared)
        self._booleans = tuple(i for i, a in enumerate(declared) if isinstance(a, str) and a.split()[0] == "bool")
        self._places = tuple(i for i, kind in enumerate(self._kinds) if kind is not None)
        self._number_places = tuple(self.names.index(number) for number in self._numbers)
        self._plans = Plans(self._build)
        letters = iter("abcdefgh")
        kinds = []
        for a in declared:
            if isinstance(a, Argument):
                alias = f"({next(letters)}!)" if a.written else ""
                a = f"Tensor{alias}{'?' if a.optional else ''} {a.name}"
            kinds.append(a)
        if self.results is None:
            returned = "Tensor[]"
        else:
            returned = ", ".join(["Tensor"] * len(self.results))
            returned = returned if len(self.results) == 1 else f"({returned})"
        written = self._write_out(name)
        self._find, launch = written["find"], written["launch"]
        plans = {} if prepare else {"plan": self._find, "copied": self._copy_unfit}
        schema = f"{name}({', '.join(kinds)}) -> {returned}"
        super().__init__(schema, launch=launch, reference=self._run_reference, fake=self._fake, **plans)

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
        return f"plans[{', '.join([*keys, *told_apart])},]"  # ``_build`` does not look at the last ones

    def _write_out(self, operator: str) -> dict[str, Any]:
        """Generate ``find`` and ``launch`` with a parameter for each argument, as ``TorchOp.call`` is generated.

        ``find`` returns the plan of a call and builds it if needed. ``launch`` runs it. All other cases (tensors that
        must be copied or converted, or plans without launches) are left to ``_launch_prepared``.
        """
        names = ", ".join(self.names)
        checks = f"check_numbers({', '.join(self._numbers)})\n    " if self._check_numbers else ""
        prepare = f"{names} = prepare({names})\n    " if self._prepare else ""
        given = [self._address(name, kind) for name, kind in zip(self.names, self._kinds, strict=True) if kind]
        counting = "{0} is None or {0}.is_inference() or increment_version({0})\n        "
        counted = "".join(map(counting.format, self._written)) if self.counts_versions else ""
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
    return launch_prepared({names})
"""
        scope = {
            "plans": self._plans,
            "check_numbers": self._check_numbers,
            "prepare": self._prepare,
            "StepPlan": StepPlan,
            "increment_version": torch.autograd.graph.increment_version,
            "launch_prepared": self._launch_prepared,
            "active_traces": active_traces,
            "own_trace": own_trace,
            "operator": self,
        }
        exec(written_code(source, f"<rtkernels plans of {operator}>"), scope)
        return scope

    @staticmethod
    def _address(name: str, kind: Argument) -> str:
        return f"0 if {name} is None else {name}.data_ptr()" if kind.optional else f"{name}.data_ptr()"

    def _write_run_and_keep(self) -> None:
        """Generate ``run_and_keep``, for calls whose plan was run before, but not by one of the last calls."""
        names = ", ".join(self.names)
        kinds = {name: kind for name, kind in zip(self.names, self._kinds, strict=True) if kind}
        tensors = ", ".join(kinds)
        pointers = "".join(f"    pointer_{name} = {self._address(name, kind)}\n" for name, kind in kinds.items())
        run = ", ".join([*(f"pointer_{name}" for name in kinds), *self._numbers])
        counting = "    {0} is None or {0}.is_inference() or increment_version({0})\n"
        counted = "".join(map(counting.format, self._written))
        checks = f"    check_numbers({', '.join(self._numbers)})\n" if self._check_numbers else ""
        source = f"""
def run_and_keep({names}):
    global last_calls
{checks}    plan = {self._key()}
    matches = plan.matches if type(plan) is StepPlan and not plan.converted else None
    if matches is None or not matches({tensors}):
        return run_and_keep_slowly(plan, {names})
{pointers}\
    if ({" | ".join(f"pointer_{name}" for name in kinds)}) & 15:
        return run_and_keep_slowly(plan, {names})
    last_calls = last_with(last_calls, matches, plan.run, options_of({names}))
    returned = plan.run({run})
{counted}    return returned
"""
        scope = self.call.__globals__
        scope["run_and_keep_slowly"] = lambda plan, *args: self._run_and_keep(scope, args, plan)
        scope |= {"plans": self._plans, "StepPlan": StepPlan}
        scope["check_numbers"] = self._check_numbers
        exec(written_code(source, f"<rtkernels replay of {self.name}>"), scope)

    def values(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments with a Meta for each tensor, as if its address were a multiple of 16."""
        return tuple(
            a if kind is None or a is None else Meta(a.dtype, a.shape, a.stride(), a.get_device(), 0)
            for kind, a in zip(self._kinds, args, strict=True)
        )

    def check(self, *values: Any) -> None:
        """Raise an ArgumentError for metas and options that are unsupported or do not go together."""
        given = dict(zip(self.names, values, strict=True))
        for i in self._booleans:
            check_boolean(self.names[i], values[i])
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

    def _build(self, *key: Any) -> Plan | None:
        keys = iter(key)
        values = []
        for name, kind in zip(self.names, self._kinds, strict=True):
            value = None if name in self._numbers else next(keys)
            values.append(value if kind is None or value is None else Meta(*value))
        self.check(*values)
        for kind, value in zip(self._kinds, values, strict=True):
            if kind is not None and value is not None and not kind.fits(value):
                return None
        device = next(value for kind, value in zip(self._kinds, values, strict=True) if kind is not None).device
        outputs = self._memory(values)
        targets = [memory for memory in outputs.values() if memory is not None]
        for kind, value in zip(self._kinds, values, strict=True):
            targets += [value] if kind is not None and kind.written and value is not None else []
        if not self._plans_empty and all(0 in memory.shape for memory in targets):
            steps = Steps()
        elif not self._plans_empty and any(isinstance(value, Meta) and 0 in value.shape for value in values):
            steps = IN_TORCH
        else:
            known = [value for name, value in zip(self.names, values, strict=True) if name not in self._numbers]
            steps = self._make_steps(*known, device)
        if steps is IN_TORCH or steps.instead is not None:
            return steps
        names = [argument.name for argument in self.arguments]
        given = dict(zip(self.names, values, strict=True))
        absent = [name for name in names if given[name] is None]
        shape = "list" if self.results is None else "single" if len(self.results) == 1 else "tuple"
        guards = guards_of(self.arguments, given)
        return StepPlan(self.name, names, self._numbers, outputs, shape, steps, device, absent, guards)

    def _copy_unfit(self, *args: Any) -> tuple[Any, ...]:
        copied = list(args)
        for i, value in enumerate(self.values(*args)):
            if isinstance(value, Meta) and not self._kinds[i].fits(value._replace(misaligned=args[i].data_ptr() & 15)):
                copied[i] = self._kinds[i].copied(args[i])
        return tuple(copied)

    # Running a call.

    def _planned(self, args: tuple[Any, ...], plan: Plan | None = None) -> tuple[Plan, tuple[Any, ...]]:
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

    def _launch_planned(self, *args: Any) -> Any:
        return self._launch_prepared(*(args if self._prepare is None else self._prepare(*args)))

    def _launch_prepared(self, *args: Any) -> Any:
        return self._run_planned(*self._planned(args), args)

    def _run_planned(self, plan: Plan | Steps, used: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if plan is IN_TORCH:
            results = self._written_reference(*used)
        elif type(plan) is Steps:
            results = plan.instead(*used)
        else:
            results = plan.run(*self._addresses(used), *[args[i] for i in self._number_places])
        if self._written:
            for i in self._places:
                if self._kinds[i].written and used[i] is not args[i]:
                    args[i].copy_(used[i])
            self._count_versions(args)
        return results

    def _count_versions(self, args: tuple[Any, ...]) -> None:
        for i in self._places if self.counts_versions else ():
            if self._kinds[i].written and args[i] is not None and not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])

    def _run_reference(self, *args: Any) -> Any:
        self.check(*self.values(*args))
        if self._check_numbers is not None:
            self._check_numbers(*[args[i] for i in self._number_places])
        if self._prepare is not None:
            args = self._prepare(*args)
        if self._written:
            self._refuse_shared(args)
        return self._written_reference(*args)

    def _fake(self, *args: Any) -> Any:
        first = args[self._places[0]]
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


class Operator(Declared, TorchOp):
    """A declared operator."""

    def _make_call(self) -> Callable[..., Any]:
        self.call = super()._make_call()
        if self._plan is not None:
            self._write_run_and_keep()
        return self.call

    def at_site(self) -> Callable[..., Any]:
        """Return another ``call`` for one call site, with recent calls of its own.

        If several call sites alternate, each with its own metadata, no call matches the one before it. But in a model
        of equal layers, each call matches the last one from the same call site.
        """
        call = self.call
        try:
            return self._make_call()
        finally:
            self.call = call


class InPlaceOperator(Declared, MutatingOp):
    """A declared operator that overwrites some of its arguments. Every call goes through the dispatcher."""


class _Unregistered:
    """Replaces ``TorchOp`` as a base class: nothing is registered with torch."""

    def __init__(self, schema: str, launch: Callable[..., Any], **_: Any) -> None:
        self.name, self._tensors, self.launch = schema.split("(", 1)[0], self._places, launch

    _addresses = TorchOp._addresses


class Internal(Declared, _Unregistered):
    """Steps that launchers of operators run on tensors with ``launch``, unknown to torch."""
