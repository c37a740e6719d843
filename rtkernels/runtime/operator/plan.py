"""Plans: what a call does, worked out from everything but the addresses of its tensors (see ``TorchOp``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.memory import Allocate


class Plan(ABC):
    """One call of an operator, to be run as often as it comes again."""

    __slots__ = ("matches",)

    def __init__(self) -> None:
        self.matches: Callable[..., bool] | None = None  # its operator finds it again by this; made at its first use

    @abstractmethod
    def run(self, *addresses: int) -> Any:
        """Allocate results, launch and return them. Addresses are those of the operator's tensors, 0 for None."""


class DensePlan(Plan):
    """One launch, if there is anything to do, and one dense result: ``allocate(*layout)`` makes it."""

    __slots__ = ("allocate", "launch", "layout")

    def __init__(self, launch: Launch | None, allocate: Allocate, layout: tuple[Any, ...]) -> None:
        super().__init__()
        self.launch, self.allocate, self.layout = launch, allocate, layout
