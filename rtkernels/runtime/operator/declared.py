"""The two kinds of declarations: operators, which torch knows, and primitives, which only our code calls.

Both are checked and planned alike (``declaration.py``). ``kinds.py`` has the kinds of arguments, which this module
re-exports, ``lists.py`` those of operators over lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from rtkernels import emulator
from rtkernels.errors import ArgumentError
from rtkernels.runtime.depends import option_code
from rtkernels.runtime.invariance import LEVEL_CODE, LEVEL_SCOPE
from rtkernels.runtime.launch.device import emulating
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.arguments import check_kind
from rtkernels.runtime.operator.declaration import Declared, Planned
from rtkernels.runtime.operator.kinds import Aligned as Aligned
from rtkernels.runtime.operator.kinds import Argument as Argument
from rtkernels.runtime.operator.kinds import Dense as Dense
from rtkernels.runtime.operator.kinds import DenseFloat as DenseFloat
from rtkernels.runtime.operator.kinds import Exact as Exact
from rtkernels.runtime.operator.kinds import InPlace as InPlace
from rtkernels.runtime.operator.kinds import InPlaceAligned as InPlaceAligned
from rtkernels.runtime.operator.kinds import InPlaceExact as InPlaceExact
from rtkernels.runtime.operator.kinds import InPlaceRows as InPlaceRows
from rtkernels.runtime.operator.kinds import InPlaceVectors as InPlaceVectors
from rtkernels.runtime.operator.kinds import Meta as Meta
from rtkernels.runtime.operator.kinds import Rows as Rows
from rtkernels.runtime.operator.kinds import UnitStride as UnitStride
from rtkernels.runtime.operator.kinds import dense_as as dense_as
from rtkernels.runtime.operator.kinds import misaligned as misaligned
from rtkernels.runtime.operator.lists import Number as Number
from rtkernels.runtime.operator.lists import Tensors as Tensors
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.plan import Steps
from rtkernels.runtime.torch_private import increment_versions, same_tensors

_FIRST_TRIED = 4  # recent calls that are compared before a look-up, because layers of different shapes alternate


def last_with(
    calls: tuple[Any, ...], matches: Callable[..., bool], run: Callable[..., Any], options: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the recent calls of an operator with a new one in front: comparison, plan and options of each."""
    return (matches, run, options), *[call for call in calls if call[1] is not run][: _FIRST_TRIED - 1]


class Operator(Declared, TorchOp):
    """A declared operator, ``torch.ops.rtkernels.<name>``. Arguments as for ``Declared``.

    A call that matches one of the last few runs its plan, found by one comparison in C++. This also serves calls that
    autograd records, which are not replayed as a whole.
    """

    def __init__(self, name: str, arguments: Sequence[Argument | Tensors | Number | str], **declaration: Any) -> None:
        Declared.__init__(self, name, arguments, **declaration)
        self._compared = self.resolves_lazy = self._prepare is None and self.lists is None
        TorchOp.__init__(self, self.schema, launch=self.launch, reference=self._run_reference, fake=self._fake)

    def check(self, *values: Any) -> None:
        """Raise an ArgumentError for metas and options that are unsupported or do not go together.

        Steps need not use every option, so one of another type would be found only where the dispatcher sees the call.
        """
        for name, value in zip(self.names, values, strict=True):
            if name in self._option_types and name not in self._numbers:
                check_kind(name, self._option_types[name], value)
        super().check(*values)

    def at_site(self) -> Callable[..., Any]:
        """Return another ``call`` for one call site, with recent calls of its own.

        If several call sites alternate, each with its own metadata, no call matches the one before it. But in a model
        of equal layers, each call matches the last one from the same call site.
        """
        return self._make_call()

    def _short_cuts(self) -> tuple[str, str, dict[str, Any]]:
        names = ", ".join(self.names)
        if self.lists is not None and self._prepare is not None:
            scope = self.lists.scope | {"prepare": self._prepare}
            return f"{self.lists.known_lines}    {names} = prepare({names})\n", "", scope
        if not self._compared:
            return "", "", {}
        scope: dict[str, Any] = {
            "last_calls": (), "last_with": last_with, "plans": self._plans, "check_numbers": self._check_numbers,
            "increment_versions": increment_versions, **LEVEL_SCOPE,
        }  # fmt: skip
        tensors = ", ".join(argument.name for argument in self.arguments)
        addresses = {f"pointer_{a.name}": self._address(a.name, a) for a in self.arguments}
        options = "".join(f"{self._option(name)}, " for name in self.option_names) + LEVEL_CODE + ","
        assign = "".join(f"                {pointer} = {address}\n" for pointer, address in addresses.items())
        run = f"return run({', '.join([*addresses, *self._numbers])})"
        if self._counted:
            run = f"returned = {run.removeprefix('return ')}; {'; '.join(self._counted)}; return returned"
        replay = f"""\
    global last_calls
    if not is_dynamo_compiling() and forward_ad._current_level < 0 and not dispatch_modes():
        calls = last_calls
        for one in calls:
            matches, run, options = one
            if matches({tensors}) and options == ({options}):
{assign}\
                if not ({" | ".join(addresses)}) & 15:
                    if one is not calls[0] and calls is last_calls:
                        last_calls = last_with(calls, *one)
                    {run}
"""
        count = "".join(f"    {line}\n" for line in self._counted)
        checks = f"    check_numbers({', '.join(self._numbers)})\n" if self._check_numbers else ""
        # ``matches`` is known of plans for aligned tensors that are not converted: their key says so.
        functions = f"""
def launch({names}):
    global last_calls
{checks}    plan = {self._key()}
    matches = getattr(plan, "matches", None)
    if matches is None or not matches({tensors}):
        return launch_slowly(plan, {names})
    last_calls = last_with(last_calls, matches, plan.run, options_of({names}))
    returned = plan.run({", ".join([*addresses.values(), *self._numbers])})
{count}    return returned

def options_of({names}):
    return ({options})
"""
        return replay, functions, scope

    def _make_call(self) -> Callable[..., Any]:
        call = super()._make_call()
        if self._compared:
            scope = call.__globals__
            scope["launch_slowly"] = lambda plan, *args: self._launch_slowly(scope, plan, args)
            Plans.replays.append(lambda: scope.update(last_calls=()))
        return call

    def _option(self, name: str) -> str:
        """Return the expression of an option in comparisons with recent calls; plans do not depend on numbers."""
        return name if name in self._numbers else option_code(name, self._option_types[name])

    def _launch_slowly(self, scope: dict[str, Any], plan: Planned, args: tuple[Any, ...]) -> Any:
        """Run a plan, and keep it in front of the recent calls if its tensors can be compared in C++."""
        plan, used = self._planned(args, plan)
        given = [args[i] for i in self._places]
        if any(t is not None and (t.is_neg() or t.is_conj()) for t in given):  # lazy, as ``z.conj().imag`` is
            if self._written:
                self._check_types(*args)
            resolved = (a.resolve_neg().resolve_conj() if isinstance(a, torch.Tensor) else a for a in args)
            return self._launch_prepared(tuple(resolved))
        if type(plan) is not Steps and used is args and not any(address & 15 for address in self._addresses(args)):
            if plan.matches is None or not plan.matches(*given):  # or created in inference mode
                plan.matches = same_tensors(given)
            options = scope["options_of"](*args)
            # A single assignment, so that other threads see all of it or nothing.
            scope["last_calls"] = last_with(scope["last_calls"], plan.matches, plan.run, options)
        return self._run_planned(plan, used, args)


class Primitive:
    """Steps on tensors, planned from metadata and hashable options.

    Versions of what it overwrites are counted around it: by the dispatcher, or not at all for scratch.

    Args:
        name: For tracebacks.
        arguments: Its tensors.
        options: Its other arguments, hashable ones: names separated by commas, with types as in a schema on request.
        results: Names of what it returns.
        outputs: Returns a Memory for each result, as for ``Operator``.
        plan: Returns ``Steps``, as for ``Operator``; not called for results without elements.
        numbers: Names of options that no plan depends on.
        reference: Computes results of empty tensors. None: these are refused, and torch's own operator has the call.
        plans_empty: As for ``Operator``.
    """

    def __init__(
        self, name: str, arguments: Sequence[Argument], options: str = "", *, results: str,
        outputs: Callable[..., Any] | None = None, plan: Callable[..., Steps], numbers: str = "",
        reference: Callable[..., Any] | None = None, plans_empty: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        typed = (o if " " in o else f"int {o}" for o in map(str.strip, options.split(",")) if o)
        self._declaration = {
            "arguments": arguments, "options": ", ".join(typed), "results": results, "outputs": outputs or (lambda: ()),
            "plan": plan, "reference": reference or self._has_no_reference, "numbers": numbers,
            "plans_empty": plans_empty, "counts_versions": False,
        }  # fmt: skip

    @cached_property
    def _declared(self) -> Declared:
        """The steps, declared by the first call: `rtkernels.enable()` imports all primitives, and calls none."""
        return Declared(self.name, **self._declaration)

    def _has_no_reference(self) -> Any:
        """Torch's own operator is the reference; an override that raises this gives the call back to it."""
        raise ArgumentError(f"{self.name}: a tensor has no elements; expected at least one")

    @staticmethod
    def can_launch(tensor: torch.Tensor) -> bool:
        """Return True if a call with this tensor launches, on its device or in the emulator."""
        return tensor.is_cuda or (tensor.is_cpu and emulator.active() is not None)

    def __call__(self, *args: Any) -> Any:
        first = args[0]
        if first.is_cuda:
            return self._declared.launch(*args)
        features = emulator.active()
        if features is None:
            raise ArgumentError(f"{self.name}: tensors are on {first.device}; expected a CUDA device, or the emulator")
        with emulating(features):
            return self._declared.launch(*args)
