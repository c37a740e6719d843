"""Launches that the aten layer makes: no schema, fake or gradient of their own, as torch's operators have those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.operator.declared import Argument, Internal
from rtkernels.runtime.operator.plan import Memory as Memory
from rtkernels.runtime.operator.plan import Steps


class _Steps(Internal):
    """Steps below torch's dispatcher, which has counted the versions of what an in-place operator overwrites."""

    counts_versions = False


class Primitive:
    """Steps on tensors, planned from metadata and hashable options.

    Args:
        name: For tracebacks.
        arguments: Its tensors.
        options: Names of its other arguments, separated by commas; hashable ones.
        results: Names of what it returns.
        outputs: Returns a Memory for each result, as for ``Operator``.
        plan: Returns ``Steps``, as for ``Operator``; never called for results without elements.
        numbers: Names of options that no plan depends on.
    """

    def __init__(
        self, name: str, arguments: Sequence[Argument], options: str = "", *, results: str,
        outputs: Callable[..., Any] | None = None, plan: Callable[..., Steps], numbers: str = "",
    ) -> None:  # fmt: skip
        self.name = name
        listed = ", ".join(f"int {option.strip()}" for option in options.split(",") if option)
        self._declaration = {
            "arguments": arguments, "options": listed, "results": results, "outputs": outputs or (lambda: ()),
            "plan": plan, "reference": self._has_no_reference, "numbers": numbers,
        }  # fmt: skip

    @cached_property
    def _steps(self) -> _Steps:
        """The steps, declared by the first call: `rtkernels.enable()` imports all primitives, and calls none."""
        return _Steps(self.name, **self._declaration)

    def _has_no_reference(self) -> Any:
        """Torch's own operator is the reference; an override that raises this gives the call back to it."""
        raise ArgumentError(f"{self.name}: a tensor has no elements; expected at least one")

    def __call__(self, *args: Any) -> Any:
        first = args[0]
        if first.is_cuda:
            return self._steps.launch(*args)
        from rtkernels import emulator

        features = emulator.active()
        if features is None:
            raise ArgumentError(f"{self.name}: tensors are on {first.device}; expected a CUDA device, or the emulator")
        with emulator.lock:
            emulate_features(features)
            with emulator.recording():
                return self._steps.launch(*args)
