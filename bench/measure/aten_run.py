"""All cases of ``python -m bench aten``: ours and torch's in this process, peers' in another; written as they come."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import rtkernels
from bench.measure import aten, aten_file, aten_flaggems
from bench.measure.aten_bounds import bounds
from bench.measure.aten_peers import Case, Worker
from bench.measure.timing import Timer
from rtkernels.aten import table
from rtkernels.runtime.progress import Bar

_OURS = ("torch", "rtkernels")  # measured here, the others by the worker

Wanted = tuple[table.Overload, tuple[int, ...], torch.dtype, tuple[str, ...]]
Cases = dict[Case, dict[str, Any]]


def run(
    pattern: str, out: Path, *, ways: tuple[str, ...], limit: int | None, quick: bool, resume: bool = False,
    seconds: float | None = None, host: dict[str, float] | None = None, level: str = "core",
) -> dict[str, Any]:  # fmt: skip
    """Measure all cases and return the contents of the file. Each finished case is written at once.

    Ours and torch's come first, candidates for the default set before the others; then peers' kernels are compiled, and
    the peers are measured in the same order, in a process of their own. If the time runs out, the last of these are
    missing: ``complete`` is then false, and `resume` continues.

    Args:
        pattern: Regular expression on "family overload".
        out: The file.
        ways: Of ``aten.WAYS``.
        limit: Leave out shapes with more elements.
        quick: The cases of ``aten.quick_cases``, and few calls of each; FlagGems on two sizes of each.
        resume: Keep what the file has, and measure the other cases.
        seconds: Begin no case after this time.
        host: What ``host_times`` and ``enable_times`` gave, if that is known.
        level: "core" or "comprehensive": the shapes. With `quick`, "comprehensive" is the default set at other shapes.
    """
    from bench import meta
    from bench.measure.timing import CudaDevice

    asked = _Run(pattern, out, ways, limit, quick, resume, seconds, time.perf_counter(), level)
    result = aten_file.load(out) if resume else None
    if result is not None:
        meta.check_source(result["environment"], out)
    clock = aten.timer(CudaDevice(), quick)
    if result is None:
        result = {
            "environment": meta.environment(), "quick": quick, "level": level, "complete": False,
            "host": host or host_times() | enable_times(), "bounds": bounds(clock) if "rtkernels" in ways else {},
            "cases": [],
        }  # fmt: skip
    elif level != "core":
        result["level"] = level
    aten_file.save(result, out)
    _measure_cases(asked, result, clock)
    aten_file.save(result, out)
    print(aten_file.summary(result["cases"]))
    if any("kernel" in case.get("torch", {}) for case in result["cases"]):
        print(aten_file.summary(result["cases"], "kernel"))
    if "flaggems" in ways:
        print(aten_file.against_flaggems(result["cases"]))
    return result


@dataclass(frozen=True)
class _Run:
    """What ``run`` was asked for, and when it began."""

    pattern: str
    out: Path
    ways: tuple[str, ...]
    limit: int | None
    quick: bool
    resume: bool
    seconds: float | None
    begun: float
    level: str = "core"
    bar: Bar = field(default_factory=lambda: Bar(0, "cases"))

    def counted(self, wanted: list[Wanted]) -> Iterator[Wanted]:
        """Yield cases, each of which the bar counts when it is done."""
        with self.bar:
            self.bar.total = len(wanted)
            yield from self.bar.over(wanted)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(way for way in self.ways if way not in _OURS)

    @property
    def is_over(self) -> bool:
        return self.seconds is not None and self.passed > self.seconds

    @property
    def passed(self) -> float:
        return time.perf_counter() - self.begun


def _measure_cases(asked: _Run, result: dict[str, Any], clock: Timer) -> None:
    """Measure what the result lacks, in the order of ``run``."""
    cases = {_name(case["overload"], case["shape"], case["dtype"]): case for case in result["cases"]}
    wanted = _wanted(asked, cases)
    ended = _measure_ours(asked, cases, wanted, clock)
    torch.cuda.empty_cache()  # the other process needs some
    ended = _measure_peers(asked, cases, wanted) or ended
    result["complete"], result["cases"] = not ended, list(cases.values())


def _measure_ours(asked: _Run, cases: Cases, wanted: list[Wanted], clock: Timer) -> bool:
    """Measure torch's and our kernels; return True if the time runs out."""
    wanted = _only(wanted, _OURS)
    if asked.quick and any("rtkernels" in ways for *_, ways in wanted):
        warm([case[:3] for case in wanted])
        print(f"ours compiled: {asked.passed:.0f} s", flush=True)
    for row, shape, dtype, ways in asked.counted(wanted):
        if asked.is_over:
            return True
        compared = bool(asked.peers) and aten_flaggems.is_representative(shape, dtype)
        found = aten.measure_case(row, shape, dtype, clock, ways, asked.quick, compared)
        _keep(asked, cases, row, _name(row.name, shape, dtype), ways, found)
        if math.prod(shape) > 1 << 26:
            torch.cuda.empty_cache()
    print(f"torch and ours measured: {asked.passed:.0f} s", flush=True)
    return False


def _measure_peers(asked: _Run, cases: Cases, wanted: list[Wanted]) -> bool:
    """Measure the peers; return True if the time runs out, or if there seem to be none."""
    wanted = _only(wanted, asked.peers)
    if not wanted or asked.is_over:
        return bool(wanted)
    with contextlib.closing(Worker()) as worker:  # it imports while kernels are compiled
        errors = _compiled(asked, wanted) if asked.quick else None
        for row, shape, dtype, ways in asked.counted(wanted):
            if asked.is_over or worker.is_hopeless:
                return True
            name = _name(row.name, shape, dtype)
            error = "" if errors is None else errors.get(name)
            called = tuple(way for way in ways if way != "flaggems" or error == "")
            found = worker.measure(name, called, asked.quick) if called else {}
            if error:
                found["flaggems"] = {"error": error}
            if found:
                _keep(asked, cases, row, name, ways, found)
    print(f"{', '.join(asked.peers)} measured: {asked.passed:.0f} s", flush=True)
    return False


def _only(wanted: list[Wanted], ways: tuple[str, ...]) -> list[Wanted]:
    """Return the cases that lack one of these ways, with what they lack of them."""
    found = [(*case[:3], tuple(way for way in ways if way in case[3])) for case in wanted]
    return [case for case in found if case[3]]


def _keep(
    asked: _Run, cases: Cases, row: table.Overload, name: Case, ways: tuple[str, ...], found: dict[str, Any]
) -> None:
    """Add times to a case, here and in the file."""
    shape, dtype = list(name[1]), name[2]
    case = cases.setdefault(name, {"overload": row.name, "family": row.family, "shape": shape, "dtype": dtype})
    case |= found
    case["ways"] = [*case.get("ways", ()), *ways]  # asked for; one that a peer lacks has no times
    aten_file.append(case, asked.out)
    if not asked.quick:
        asked.bar.tell(aten_file.line(case), sys.stdout)


def _name(overload: str, shape: Sequence[int], dtype: torch.dtype | str) -> Case:
    return overload, tuple(shape), str(dtype).removeprefix("torch.")


def _wanted(asked: _Run, cases: Cases) -> list[Wanted]:
    """Return the cases to measure, with the ways that each still lacks."""
    wanted = []
    every = aten.cases(asked.pattern, asked.limit, asked.level)
    for row, shape, dtype in aten.quick_cases(asked.pattern, asked.level) if asked.quick else every:
        for_peers = not asked.quick or aten_flaggems.is_representative(shape, dtype)
        case_ways = tuple(way for way in asked.ways if for_peers or way not in asked.peers)
        known = cases.get(_name(row.name, shape, dtype), {}).get("ways", ())
        if missing := tuple(way for way in case_ways if way not in known):
            wanted.append((row, shape, dtype, missing))
    return wanted


def _compiled(asked: _Run, wanted: list[Wanted]) -> dict[Case, str]:
    """Compile FlagGems' kernels, for up to a third of the time or half of what is left of it.

    Return its error for each case, empty where it worked, without cases that it lacks or that were not reached.
    """
    listed = [_name(row.name, shape, dtype) for row, shape, dtype, ways in wanted if "flaggems" in ways]
    seconds = 60.0 if asked.seconds is None else min(asked.seconds / 3, (asked.seconds - asked.passed) / 2)
    tried = aten_flaggems.compile_cases(listed, seconds=seconds) if listed else {}
    failed = sum(map(bool, tried.values()))
    print(f"FlagGems has {len(tried)} of {len(listed)} cases, {failed} fail: {asked.passed:.0f} s", flush=True)
    return tried


def warm(listed: list[tuple[table.Overload, tuple[int, ...], torch.dtype]], threads: int = 16) -> None:
    """Call every case once, in threads, to compile several kernels at a time; large shapes use the same kernels."""

    def one(case: tuple[table.Overload, tuple[int, ...], torch.dtype]) -> None:
        row, shape, dtype = case
        with contextlib.suppress(Exception), torch.no_grad():  # the measurement says what failed
            given = aten.arguments(row, shape, dtype, "cuda")
            if given is not None:
                aten.operator_of(row)(*given[0], **given[1])

    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    try:
        with rtkernels.use("all"), ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, [case for case in listed if math.prod(case[1]) <= 1 << 26]))
    finally:
        table.MIN_ELEMENTS.update(limits)
    torch.cuda.synchronize()


_ENABLE = (
    "import time, torch, rtkernels; torch.cuda.init(); t = time.perf_counter(); "
    "rtkernels.enable(); print((time.perf_counter() - t) * 1e3)"
)


def host_times() -> dict[str, float]:
    """Return the host's µs of small calls: torch's own, through an override that passes them on, and our kernels'."""
    x = torch.randn(64, 64, device="cuda")
    calls = {
        "sum.dim_IntList": lambda: torch.ops.aten.sum.dim_IntList(x, [1]),
        "_softmax": lambda: torch.ops.aten._softmax.default(x, 1, False),
        "abs": lambda: torch.ops.aten.abs.default(x),
        "add.Tensor": lambda: torch.ops.aten.add.Tensor(x, x),
    }
    found: dict[str, float] = {}
    limits = dict(table.MIN_ELEMENTS)
    try:
        for name, call in calls.items():
            found[f"torch {name}"] = min(aten.wall_us(call, 300, 1e6)["submit"] for _ in range(5))
            for way, limit in (("given back", 1 << 62), ("rtkernels", 0)):
                table.MIN_ELEMENTS.update(dict.fromkeys(limits, limit))
                with rtkernels.use(name):
                    found[f"{way} {name}"] = min(aten.wall_us(call, 300, 1e6)["submit"] for _ in range(5))
    finally:
        table.MIN_ELEMENTS.update(limits)
    return found


def enable_times() -> dict[str, float]:
    """Return what ``enable`` takes in a fresh process, in ms; imports are a part of it."""
    command = [sys.executable, "-c", _ENABLE]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    return {"enable default ms": float(printed or "nan")}
