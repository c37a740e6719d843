"""Device code that has not run on a GPU yet: emulated and compiled only, so nothing chooses it.

Whatever chooses a kernel asks a switch, which is False. Tests marked ``gpu`` and ``bench campaign`` turn it on for a
while; when the code has run and is worth choosing, the switch is removed. ``bench/campaign/trials.py`` says which tests
run the code of a switch, and which rows time calls with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from rtkernels.runtime.launch.plans import Plans


class Untried:
    """A switch that is False until device code has run on a GPU.

    Args:
        name: Of what it turns on.
    """

    switches: ClassVar[dict[str, Untried]] = {}

    def __init__(self, name: str) -> None:
        self.name, self._on = name, False
        self.switches[name] = self

    def __bool__(self) -> bool:
        return self._on

    def set(self, on: bool) -> None:
        """Turn it on or off for the process; plans made before are forgotten."""
        if on != self._on:
            self._on = on
            Plans.forget_all()

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Let the code be chosen in a scope, in all threads."""
        before = self._on
        self.set(True)
        try:
            yield
        finally:
            self.set(before)
