"""The pytest plugin behind ``python -m mutation run``: every test against the mutants that it reaches.

Workers share the collected tests. Each test runs once as it is (this compiles its kernels, with all mutants in them and
none of them on), a second time to see how long it takes and which mutants it reaches, and then once for each of these,
every time in a process of its own: a mutant may crash, hang, or leave invalid counters in a workspace.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import gzip
import importlib
import json
import mmap
import os
import pkgutil
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutation import mutator, schemata
from mutation.processes import apart, fork
from rtkernels.emulator import _build

FOLDERS = tuple(f"tests/{name}" for name in ("ops", "aten", "conformance", "nn", "optim", "contracts"))
ENOUGH = 8  # tests known to kill a mutant; more say nothing new
TRIES = (
    60  # after this many tests that reach a mutant without killing it, no more are run; twice that if at most one kills
)
# Tests that compile with NVRTC, read files or stop before they launch anything.
_NEVER = re.compile(
    r"test_(kernels_compile|machine_code|package|docs|examples|words)\.py|error|same_messages|bad_arguments"
)
_SEEN_CASES = 3  # cases of a test function after which it is known what its cases reach
_CLEAN_LIMIT = 120.0  # seconds of a test without a mutant
_MUTANTS_LIMIT = 40.0  # seconds of a test with all mutants that others kill
_SAVE_EVERY = 20.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the command line of ``mutation`` passes on."""
    group = parser.getgroup("mutation")
    group.addoption("--mutation-out", type=Path, required=True)
    group.addoption("--mutation-jobs", type=int, default=1)
    group.addoption("--mutation-seconds", type=float, default=1e9)
    group.addoption("--mutation-known", type=Path, nargs="*", default=[])
    group.addoption("--mutation-tests", type=Path, default=None)
    group.addoption("--mutation-mutants", type=Path, default=None)
    group.addoption("--mutation-tries", type=int, default=TRIES)


@dataclass
class _Shared:
    """What workers know of each other's results, in memory that they share."""

    next: mmap.mmap
    kills: mmap.mmap
    tries: mmap.mmap
    cases: mmap.mmap
    reached: mmap.mmap  # [functions, mutants]


class Runner:
    """The run: mutants, tests, workers."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.out: Path = config.getoption("--mutation-out")
        self.jobs: int = config.getoption("--mutation-jobs")
        self.end = time.monotonic() + config.getoption("--mutation-seconds")
        self.tries: int = config.getoption("--mutation-tries")
        self.mutants = list(mutator.all_mutants().values())
        if path := config.getoption("--mutation-mutants"):
            wanted = set(path.read_text().splitlines())
            self.mutants = [mutant for mutant in self.mutants if mutant.name in wanted]
        self.place = {mutant.number: i for i, mutant in enumerate(self.mutants)}
        self.items = items
        (conftest,) = (p for p in config.pluginmanager.get_plugins() if hasattr(p, "in_every_run"))
        self.always = {item.nodeid for item in items if conftest.in_every_run(item)}
        functions = sorted({_function(item) for item in items})
        self.function = {name: i for i, name in enumerate(functions)}
        count = len(self.mutants)
        sizes = (8, count, count, len(functions), len(functions) * count)
        self.shared = _Shared(*(mmap.mmap(-1, max(size, 1)) for size in sizes))
        self.folder = Path(tempfile.mkdtemp(prefix="rtkernels-mutation-"))
        self.switch = schemata.Switch(self.folder)
        schemata.plant_all(self.folder)

    def learn(self, files: list[Path]) -> None:
        """Adopt the results of earlier runs; their tests are not run again."""
        done = set()
        names = {mutant.name: i for i, mutant in enumerate(self.mutants)}
        for result in results(files):
            done.add(result["test"])
            self._count(result["test"].partition("[")[0], [names[n] for n in result["killed"] if n in names],
                        [names[n] for n in result["survived"] if n in names])  # fmt: skip
        self.items = [item for item in self.items if item.nodeid not in done]

    def _count(self, function: str, killed: list[int], survived: list[int]) -> None:
        shared, count = self.shared, len(self.mutants)
        place = self.function.get(function)
        for i in killed:
            shared.kills[i] = min(shared.kills[i] + 1, 255)
        for i in survived:
            shared.tries[i] = min(shared.tries[i] + 1, 255)
        if place is not None:
            shared.cases[place] = min(shared.cases[place] + 1, 255)
            for i in (*killed, *survived):
                shared.reached[place * count + i] = 1

    def run(self) -> None:
        """Run all workers to their end."""
        _import_all()
        gc.collect()
        gc.freeze()
        workers = []
        for worker in range(self.jobs):
            if pid := fork():
                workers.append(pid)
                continue
            code = 1
            try:
                self._work(worker)
                code = 0
            finally:
                os._exit(code)
        failed = 0
        saved = time.monotonic()
        while workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                workers.remove(pid)
                failed += status != 0
            elif time.monotonic() - saved > _SAVE_EVERY:
                self.save()
                saved = time.monotonic()
            else:
                time.sleep(0.2)
        self.save()
        shutil.rmtree(self.folder, ignore_errors=True)
        if failed:
            raise RuntimeError(f"{failed} of {self.jobs} workers failed")

    def save(self) -> None:
        """Write what workers know so far."""
        text = "".join(part.read_text() for part in sorted(self.folder.glob("*.part")))
        whole = text[: text.rfind("\n") + 1]
        self.out.write_bytes(gzip.compress(whole.encode()) if self.out.suffix == ".gz" else whole.encode())

    # ---- in a worker ------------------------------------------------------------------------------------------------

    def _next(self) -> Iterator[pytest.Item]:
        """Yield tests until there are none or the time is over, synchronised by a lock file."""
        with open(self.folder / "lock", "w") as lock:
            while time.monotonic() < self.end:
                fcntl.flock(lock, fcntl.LOCK_EX)
                at = int.from_bytes(self.shared.next[:8], "little")
                self.shared.next[:8] = (at + 1).to_bytes(8, "little")
                fcntl.flock(lock, fcntl.LOCK_UN)
                if at >= len(self.items):
                    return
                yield self.items[at]

    def _work(self, worker: int) -> None:
        chance = random.Random(worker)
        with (self.folder / f"{worker}.part").open("a") as file:
            for item in self._next():
                if self._says_nothing_new(item):
                    continue
                result = self._judge(item, chance)
                file.write(json.dumps(result) + "\n")
                file.flush()

    def _says_nothing_new(self, item: pytest.Item) -> bool:
        place, count = self.function[_function(item)], len(self.mutants)
        if self.shared.cases[place] < _SEEN_CASES:
            return False
        reached = self.shared.reached[place * count : (place + 1) * count]
        return not any(self._is_open(i) for i in range(count) if reached[i])

    def _is_open(self, i: int) -> bool:
        kills = self.shared.kills[i]
        return kills < ENOUGH and self.shared.tries[i] < self.tries * (1 if kills > 1 else 2)

    def _judge(self, item: pytest.Item, chance: random.Random) -> dict[str, Any]:
        """Return the results of one test for the mutants that it reaches."""
        result: dict[str, Any] = {"test": item.nodeid, "always": item.nodeid in self.always}
        result |= {"killed": [], "survived": []}
        first = apart(lambda: self._first(item), min(_CLEAN_LIMIT, max(self.end - time.monotonic(), 0.0) + 15.0))
        if not isinstance(first, dict) or first["outcome"] != "passed":
            return result | {"outcome": first["outcome"] if isinstance(first, dict) else str(first)}
        _build._built.update(first["built"])
        if not first["kernels"]:
            return result | {"outcome": "launches nothing"}
        start = time.monotonic()
        second = apart(lambda: self._once(item, 0), _CLEAN_LIMIT)
        if not isinstance(second, dict) or second["outcome"] != "passed":
            return result | {"outcome": "fails the second time"}
        took = time.monotonic() - start
        result |= {"outcome": "passed", "seconds": round(second["seconds"], 3), "kernels": first["kernels"]}
        reached = [self.place[number] for number in second["reached"] if number in self.place]
        result["reached"] = len(reached)
        chance.shuffle(reached)
        reached.sort(key=lambda i: min(self.shared.kills[i], 2))
        killed, survived = [], []
        start = time.monotonic()
        for i in reached:
            late = time.monotonic() - start > _MUTANTS_LIMIT and self.shared.kills[i] > 0
            if not self._is_open(i) or late or time.monotonic() > self.end:
                continue
            outcome = apart(lambda number=self.mutants[i].number: self._once(item, number), max(3.0, 6 * took))
            alive = isinstance(outcome, dict) and outcome["outcome"] == "passed"
            (survived if alive else killed).append(i)
        self._count(_function(item), killed, survived)
        result["killed"] = sorted(self.mutants[i].name for i in killed)
        result["survived"] = sorted(self.mutants[i].name for i in survived)
        return result

    # ---- in a process of a test -------------------------------------------------------------------------------------

    def _first(self, item: pytest.Item) -> dict[str, Any]:
        """Run a test as it is: its kernels are compiled; report which, and how long that took."""
        kernels: dict[str, float] = {}
        kernel, compile_ = _build.kernel, _build._compile
        spent = [0.0]

        def timed(*args: Any) -> None:
            start = time.monotonic()
            compile_(*args)
            spent[0] += time.monotonic() - start

        def named(op: str, unit: str, expression: str, arch: int, defines: tuple = (), **options: Any) -> Path:
            spent[0] = 0.0
            path = kernel(op, unit, expression, arch, defines, **options)
            key = f"{expression} {arch} {' '.join(defines)} {unit}"
            kernels[key] = round(max(kernels.get(key, 0.0), spent[0]), 2)
            return path

        _build.kernel, _build._compile = named, timed
        outcome = self._once(item, 0)
        return outcome | {"kernels": kernels, "built": dict(_build._built)}

    def _once(self, item: pytest.Item, number: int) -> dict[str, Any]:
        self.switch.choose(number)
        start = time.monotonic()
        if hasattr(item, "_initrequest"):
            item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=None)
        worst = next((r.outcome for r in reports if r.outcome != "passed"), "passed")
        return {"outcome": worst, "seconds": time.monotonic() - start, "reached": self.switch.reached()}


def _import_all() -> None:
    """Import what tests would import when they run: each of them has a process of its own."""
    importlib.import_module("torch._inductor")

    import rtkernels

    for module in pkgutil.walk_packages(rtkernels.__path__, "rtkernels."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what may emulate kernels, in an order whose first part is a fair sample of every family."""
    wanted = None
    if path := config.getoption("--mutation-tests"):
        wanted = set(path.read_text().splitlines())
    kept = [item for item in items if _may_emulate(item) and (wanted is None or item.nodeid in wanted)]
    random.Random(0).shuffle(kept)
    items[:] = kept


def _may_emulate(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.get_closest_marker("gpu"):
        return False
    if getattr(item, "callspec", None) and item.callspec.params.get("place") == "cpu":
        return False
    return not _NEVER.search(item.nodeid)


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Judge mutants instead of running tests."""
    runner = Runner(session.config, session.items)
    runner.learn(session.config.getoption("--mutation-known"))
    runner.run()
    return True


def results(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the results of runs, one a test."""
    for file in files:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        yield from map(json.loads, text.splitlines())
