"""The pytest plugin behind ``python -m tests.mutation replay``: recorded tests still kill recorded mutants.

Mutants are planted one at a time, as edits of the source: what was recorded with all of them compiled at once must hold
for them alone.
"""

from __future__ import annotations

import json
import random

import pytest
from _pytest.runner import runtestprotocol
from support.source_tree import source_tree

from mutation import mutator
from mutation.choose import RECORD
from mutation.processes import apart

_LIMIT = 120.0
_CHEAP = 0.6  # seconds with the compilation of all kernels


def drawn(seed: int, count: int, cheap: bool) -> dict[str, str]:
    """Return some mutants that the README's command kills, and the test that does; if `cheap`, in little time."""
    record = json.loads(RECORD.read_text())
    seconds = record["seconds"]
    known = sorted(
        name for name, test in record["command"].items()
        if name in mutator.all_mutants() and (not cheap or seconds[test] < _CHEAP)
    )  # fmt: skip
    chosen = random.Random(seed).sample(known, min(count, len(known)))
    return {name: record["tests"][record["command"][name]] for name in chosen}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the command line of ``mutation`` passes on."""
    parser.addoption("--replayed", type=json.loads, required=True)


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run each test as it is and with its mutants."""
    mutants = mutator.all_mutants()
    items = {item.nodeid: item for item in session.items}

    def passes(test: str, files: dict[str, str]) -> bool:
        with source_tree(files):
            return all(report.passed for report in runtestprotocol(items[test], log=False, nextitem=None))

    for name, test in session.config.getoption("--replayed").items():
        if test not in items:
            session.testsfailed += 1
            print(f"\n{test} is no longer there; it killed {name}")
            continue
        mutant = mutants[name]
        files = {mutant.file: mutator.planted(mutant)}
        as_it_is = apart(lambda test=test: passes(test, {}), _LIMIT)
        with_mutant = apart(lambda test=test, files=files: passes(test, files), _LIMIT)
        good = as_it_is is True and with_mutant is not True
        session.testsfailed += not good
        print(f"\n{'killed' if good else 'NOT KILLED'}: {mutant}\n  by {test} ({as_it_is}, {with_mutant})")
    return True
