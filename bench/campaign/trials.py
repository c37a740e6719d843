"""What ``rtkernels.runtime.launch.untried`` keeps from being chosen: tests that run it on a GPU, rows that time it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from bench.rows.row import Row
from rtkernels.runtime.launch.untried import Untried


class Trial(NamedTuple):
    """``switch``: name of the switch; ``tests``: functions with cases marked gpu; ``rows``: regex on 'name shape'."""

    switch: str
    tests: tuple[str, ...]
    rows: str


TRIALS: tuple[Trial, ...] = ()
WITH = ", untried"  # behind the shape of a row with the switch turned on


def _turned(row: Row, switch: Untried, on: bool) -> Row:
    def ours(**inputs: Any) -> Any:
        switch.set(on)  # costs nothing while it stays as it is
        return row.ours(**inputs)

    return dataclasses.replace(row, ours=ours, shape=row.shape + WITH * on)


def rows(pool: list[Row], switches: Collection[str] | None = None) -> Iterator[Row]:
    """Yield each row of each trial twice: as it is without the switch, and right behind it with the switch turned on.

    Only those of some switches if they are named.
    """
    for trial in TRIALS:
        if switches is not None and trial.switch not in switches:
            continue
        switch = Untried.switches[trial.switch]
        for row in pool:
            if re.search(trial.rows, row.label):
                yield from (_turned(row, switch, on) for on in (False, True))


def tried(outcomes: Mapping[str, str]) -> list[str]:
    """Return the switches whose tests have all run and passed, given the outcomes of single cases."""

    def passed(test: str) -> bool:
        found = [outcome for case, outcome in outcomes.items() if re.match(rf"{re.escape(test)}(\[|$)", case)]
        return "passed" in found and {*found} <= {"passed", "skipped"}

    return [trial.switch for trial in TRIALS if all(map(passed, trial.tests))]


def text(measured: list[dict[str, Any]]) -> list[str]:
    """Return a line for each row that was timed both ways."""
    times = {(row["row"], row["shape"]): row.get("us") for row in measured}
    return [
        f"{name} {shape}: {us:.1f} us, {on:.1f} us with it ({us / on:.2f} times as fast)"
        for (name, shape), us in times.items()
        if us and (on := times.get((name, shape + WITH)))
    ]
