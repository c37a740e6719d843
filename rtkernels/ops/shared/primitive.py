"""Steps that torch does not know: parts of our operators, and what overrides of aten launch.

A primitive is declared, checked and planned as an operator is. It has no schema, fake or gradient of its own, because
the operator around it, ours or torch's, has those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from rtkernels import emulator
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.operator.declared import Argument, Declared
from rtkernels.runtime.operator.plan import Memory as Memory
from rtkernels.runtime.operator.plan import Steps


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

    def __call__(self, *args: Any) -> Any:
        first = args[0]
        if first.is_cuda:
            return self._declared.launch(*args)
        features = emulator.active()
        if features is None:
            raise ArgumentError(f"{self.name}: tensors are on {first.device}; expected a CUDA device, or the emulator")
        with emulator.lock:
            emulate_features(features)
            with emulator.recording():
                return self._declared.launch(*args)
