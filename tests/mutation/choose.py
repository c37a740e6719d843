"""Chooses the slow tests of a whole run: the cheapest ones that kill most mutants."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation import mutator
from mutation.mutator import RECORD

SAMPLES = Path(__file__).resolve().parents[1] / "samples.json"
_RUN = 0.05  # seconds of a test outside of its kernels: fixtures, reports


@dataclass
class Judged:
    """What is known of one test."""

    name: str
    seconds: float
    kernels: dict[str, float]
    always: bool  # a run of the whole suite takes it anyway
    killed: set[str] = field(default_factory=set)


def collected() -> set[str]:
    """Return the node ids of all tests that there are now.

    Raises:
        RuntimeError: A file of tests cannot be imported.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--whole", "-pno:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=SAMPLES.parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {line for line in done.stdout.splitlines() if "::" in line}


def read(results: Iterable[dict[str, Any]]) -> dict[str, Judged]:
    """Return the tests that launch kernels; several runs may each contribute a part of a test's kills."""
    mutants = mutator.all_mutants()
    compiled: dict[str, float] = {}
    tests: dict[str, Judged] = {}
    for result in results:
        if result["outcome"] != "passed":
            continue
        for kernel, seconds in result["kernels"].items():
            compiled[kernel] = max(compiled.get(kernel, 0.0), seconds)
        name = result["test"]
        test = tests.setdefault(name, Judged(name, result["seconds"], result["kernels"], result["always"]))
        test.killed |= {mutant for mutant in result["killed"] if mutant in mutants}
    for test in tests.values():
        test.kernels = {kernel: compiled[kernel] for kernel in test.kernels}
    return tests


def reached(results: Iterable[dict[str, Any]]) -> set[str]:
    """Return the mutants that tests were run with."""
    return {name for result in results for name in (*result["killed"], *result["survived"])}


def cost(test: Judged, compiled: set[str]) -> float:
    """Return the seconds of a test where some kernels have been compiled."""
    return _RUN + test.seconds + sum(seconds for kernel, seconds in test.kernels.items() if kernel not in compiled)


def choose(tests: dict[str, Judged], per_mutant: float) -> tuple[list[str], float]:
    """Return tests in the order in which a greedy cover takes them, and how long they take together.

    Args:
        tests: All that were judged.
        per_mutant: Seconds that a kill may cost; more expensive ones are left to runs of families.
    """
    compiled: set[str] = set()
    covered: set[str] = set()
    for test in tests.values():
        if test.always:
            compiled |= test.kernels.keys()
            covered |= test.killed
    chosen, total = [], 0.0
    waiting = {name: test for name, test in tests.items() if not test.always}
    while True:
        best, rate, price = None, 1 / per_mutant, 0.0
        for name, test in list(waiting.items()):
            gain = len(test.killed - covered)
            if not gain:
                del waiting[name]
                continue
            seconds = cost(test, compiled)
            if gain / seconds > rate:
                best, rate, price = name, gain / seconds, seconds
        if best is None:
            return chosen, total
        test = waiting.pop(best)
        chosen.append(best)
        total += price
        compiled |= test.kernels.keys()
        covered |= test.killed


def by_file(names: Iterable[str]) -> dict[str, list[str]]:
    """Return node ids as file -> the rest of them."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        file, _, rest = name.partition("::")
        found.setdefault(file, []).append(rest)
    return found


def write(tests: dict[str, Judged], chosen: list[str], reached: set[str]) -> dict[str, int]:
    """Write the samples and the record; return how many mutants are killed by what."""
    functions = {name.partition("[")[0] for name, test in tests.items() if not test.always}
    samples = {"chosen": by_file(chosen), "judged": by_file(functions)}
    SAMPLES.write_text(json.dumps(samples, indent=1) + "\n")
    in_command = set(chosen) | {name for name, test in tests.items() if test.always}
    killers: list[str] = []
    prices: list[float] = []
    place: dict[str, int] = {}
    record: dict[str, Any] = {"tests": killers, "seconds": prices, "command": {}, "family": {}, "survived": []}
    ordered = sorted(tests.values(), key=lambda test: (cost(test, set()), test.name))
    for mutant in sorted(mutator.all_mutants()):
        found = [test for test in ordered if mutant in test.killed]
        found.sort(key=lambda test: test.name not in in_command)
        if not found:
            record["survived"].append(mutant)
            continue
        name = found[0].name
        if name not in place:
            place[name] = len(killers)
            killers.append(name)
            prices.append(round(cost(found[0], set()), 2))
        record["command" if name in in_command else "family"][mutant] = place[name]
    record["never_reached"] = sorted(set(record["survived"]) - reached)
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    return {key: len(record[key]) for key in ("command", "family", "survived", "never_reached")}


def add(tests: dict[str, Judged], chosen: list[str], reached: set[str]) -> dict[str, int]:
    """Add what a run with ``--mutants`` says of mutants without a recorded kill; samples get `chosen`.

    A mutant that tests of the run reach and none kills is recorded as a survivor, until a later run kills it.

    Args:
        tests: All that were judged.
        chosen: Those that a run of the whole suite takes from now on.
        reached: Mutants that these tests reach.
    """
    record, samples = json.loads(RECORD.read_text()), json.loads(SAMPLES.read_text())
    killers, prices = record["tests"], record["seconds"]
    killed = {*record["command"], *record["family"]}
    survived = set(record["survived"])
    for key, names in (("chosen", chosen), ("judged", {name.partition("[")[0] for name in chosen})):
        before = {f"{file}::{rest}" for file, rests in samples[key].items() for rest in rests}
        samples[key] = by_file(before | set(names))
    always = {name for name, test in tests.items() if test.always}
    in_command = always | {f"{file}::{rest}" for file, rests in samples["chosen"].items() for rest in rests}
    ordered = sorted(tests.values(), key=lambda test: (test.name not in in_command, cost(test, set()), test.name))
    counts = {"command": 0, "family": 0, "survived": 0}
    for mutant in sorted(set(mutator.all_mutants()) - killed):
        name = next((test.name for test in ordered if mutant in test.killed), None)
        if name is None:
            counts["survived"] += mutant in reached - survived
            continue
        survived.discard(mutant)
        if name not in killers:
            killers.append(name)
            prices.append(round(cost(tests[name], set()), 2))
        key = "command" if name in in_command else "family"
        record[key][mutant] = killers.index(name)
        counts[key] += 1
    survived |= reached & set(mutator.all_mutants()) - {*record["command"], *record["family"]}
    record |= {key: dict(sorted(record[key].items())) for key in ("command", "family")}
    record["survived"] = sorted(survived)
    record["never_reached"] = sorted(set(record["never_reached"]) & survived - reached)
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    SAMPLES.write_text(json.dumps(samples, indent=1) + "\n")
    return counts
