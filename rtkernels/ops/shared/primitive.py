"""Launches that the aten layer makes: no schema, fake or gradient of their own, as torch's operators have those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.operator.declared import Argument, Internal
from rtkernels.runtime.operator.plan import Memory as Memory
from rtkernels.runtime.operator.plan import Steps


def _no_reference(*_: Any) -> Any:
    raise NotImplementedError("torch's own operator is the reference")


class Primitive(Internal):
    """Steps on tensors, planned from metadata and hashable options.

    Args:
        name: For tracebacks.
        arguments: Its tensors.
        options: Names of its other arguments, separated by commas; hashable ones.
        results: Names of what it returns.
        outputs: ``(*values) -> (Memory, ...)``, as for ``Operator``.
        plan: ``(*values, device) -> Steps``, as for ``Operator``; never called for results without elements.
        numbers: Names of options that no plan depends on.
    """

    def __init__(
        self, name: str, arguments: Sequence[Argument], options: str = "", *, results: str,
        outputs: Callable[..., Any] | None = None, plan: Callable[..., Steps], numbers: str = "",
    ) -> None:  # fmt: skip
        super().__init__(
            name, arguments, options=", ".join(f"int {option.strip()}" for option in options.split(",") if option),
            results=results, outputs=outputs or (lambda *_: ()), plan=plan, reference=_no_reference, numbers=numbers,
        )  # fmt: skip

    def __call__(self, *args: Any) -> Any:
        first = args[self._places[0]]
        if first.is_cuda:
            return self.launch(*args)
        from rtkernels import emulator

        features = emulator.active()
        if features is None:
            raise ArgumentError(f"{self.name}: tensors are on {first.device}; expected a CUDA device, or the emulator")
        with emulator.lock:
            emulate_features(features)
            with emulator.recording():
                return self.launch(*args)
