"""Command line of ``python -m bench campaign``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from bench import meta, peers
from bench.campaign import parts, plugin, selection, trials
from bench.campaign.parts import Part, python

PARTS = ("tests", "trials", "rows", "sweep", "e2e")
DEFAULT_PARTS = PARTS[:-1]
WORKERS = max(8, (os.cpu_count() or 8) - 2)
MARGIN_SECONDS = 15.0  # by which a command is asked to end before it is cut off
# Estimates for the plan: of a test (of a worker), and of a row with its peers, compiled.
TEST_SECONDS, ROW_SECONDS, START_SECONDS = 2.0, 4.0, 30.0
_SOURCE = re.compile(r"^source (\w+)", re.MULTILINE)


def _parts(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    return [part for part in PARTS if part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results, at most 8 files")
    parser.add_argument("--seconds", type=float, default=1500.0, help="of everything; what runs then is ended")
    parser.add_argument("--parts", type=_parts, default=list(DEFAULT_PARTS), help=f"of {','.join(PARTS)} (without e2e)")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of those that changed since --since")
    parser.add_argument("--since", metavar="COMMIT", help="default: that of the newest record")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="limit of a test")
    parser.add_argument("--peers", type=peers.families, help="of rows (default: torch, and fla for linear attention)")
    parser.add_argument("--jobs", type=int, default=max(4, (os.cpu_count() or 4) // 2), help="processes that compile")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep")
    parser.add_argument("--resume", action="store_true", help="continue what DIR has, of the same sources")
    parser.add_argument("--dry", action="store_true", help="print the plan, run nothing; needs no GPU")


class _Plan:
    """What the parts do, in this tree."""

    def __init__(self, args: argparse.Namespace) -> None:
        from bench.rows import all_rows

        self.args, self.out, self.notes = args, args.out.resolve(), []
        self.log, self.tests_log = self.out / "campaign.log", self.out / "tests.log"
        self.pool = list(all_rows())
        self.tests = self._tests()
        self.rows, self.peers, left_out = selection.rows(self.pool, args.peers)
        if util.find_spec("xdist") is None:
            self.notes.append("pytest-xdist is not installed: one process runs the tests, and ends with one that hangs")
        if left_out:
            names = sorted({row.name for row in left_out})
            self.notes.append(f"{len(left_out)} rows need fla, which is not installed: {', '.join(names)}")

    def _tests(self) -> list[str]:
        chosen = [test for trial in trials.TRIALS for test in trial.tests] if "trials" in self.args.parts else []
        if "tests" in self.args.parts:
            commit = self.args.since or selection.newest_commit(meta.RESULTS)
            changed = None if self.args.tests else selection.changed_since(commit)
            if self.args.tests is None and changed is None:
                self.notes.append(f"git does not know {commit}: all tests marked gpu. Choose with --tests")
            chosen += self.args.tests or (["tests"] if changed is None else selection.tests_of(changed))
        return list(dict.fromkeys(chosen))

    def pytest(self, *words: str) -> list[str]:
        """Return the command line that runs the tests, or collects them."""
        workers = ["-n", str(WORKERS), "--maxschedchunk=4", "--max-worker-restart=1000"]
        here = util.find_spec("xdist") is not None
        options = ["-m", "gpu", "-p", "bench.campaign.plugin", "-p", "no:cacheprovider", "-q", "--tb=short"]
        files = dict.fromkeys(test.partition("::")[0] for test in self.tests)  # pytest takes overlapping paths twice
        paths = [path for path in files if not any(other != path and path.startswith(other + "/") for other in files)]
        return python("pytest", *options, *(words or (*workers * here, "--no-summary")), *paths)

    def environment(self) -> dict[str, str]:
        """Return what the commands need beside this process's environment: one cache for all, order of tests."""
        from rtkernels.runtime.build import places

        cache = places.location()
        size = self.tests_log.stat().st_size if self.tests_log.exists() else 0
        return {
            **({"RTKERNELS_CACHE_DIR": str(cache)} if cache else {}), plugin.PATHS: " ".join(self.tests),
            plugin.LOG: str(self.tests_log), plugin.BYTES: str(size), plugin.LIMIT: str(self.args.test_seconds),
        }  # fmt: skip

    def _bench(self, name: str, file: str, seconds: float, *words: str) -> list[str]:
        ends = max(seconds - MARGIN_SECONDS, seconds / 2)
        return python("bench", *name.split(), "--out", str(self.out / file), f"--seconds={ends:.0f}", *words)

    def _of_rows(self) -> list[str]:
        labels = "|".join(re.escape(row.label) for row in self.rows)
        return ["--missing", f"--rows=^(?:{labels})$", f"--peers={','.join(self.peers) or 'none'}"]

    def compile(self) -> list[str]:
        """Return the command that compiles what the rows need."""
        if "rows" not in self.args.parts or not self.rows:
            return []
        words = (*self._of_rows(), f"--jobs={self.args.jobs}", "--compile")
        return self._bench("run", "rows.json", self.args.seconds, *words)

    def _rows(self, seconds: float) -> list[str]:
        return self._bench("run", "rows.json", seconds, *self._of_rows(), "--resume") if self.rows else []

    def _sweep(self, seconds: float) -> list[str]:
        words = (f"--seed={self.args.seed}", f"--jobs={self.args.jobs}", f"--compile-seconds={seconds / 4:.0f}")
        return self._bench("sweep", "sweep.json", seconds, *words)

    def _e2e(self, seconds: float) -> list[str]:
        return self._bench("e2e infer --rows --together --continue", "e2e.json", seconds)

    def _trials(self, seconds: float) -> list[str]:
        switches = trials.tried(plugin.outcomes(self.tests_log))
        named = [f"--trial={switch}" for switch in switches]
        return self._bench("run", "trials.json", seconds, *named, "--peers=none", "--resume") if named else []

    def parts(self, count: int | None = None) -> list[Part]:
        """Return the parts in their order; `count`: of tests, if it is known."""
        timed = list(trials.rows(self.pool))
        tests = f"{len(self.tests)} paths" if count is None else f"{count} tests in {len(self.tests)} paths"
        found = {
            "tests": Part(
                "tests", 5, lambda _: self.pytest() if self.tests else [], tests,
                START_SECONDS + (count or 0) * TEST_SECONDS / WORKERS, self.tests_log, measures=False,
            ),
            "trials": Part(
                "trials", 2, self._trials, f"{len(timed)} rows of {len(trials.TRIALS)} switches",
                START_SECONDS + len(timed) * ROW_SECONDS,
            ),
            "rows": Part(
                "rows", 5, self._rows, f"{len(self.rows)} rows without a record, peers: {', '.join(self.peers)}",
                START_SECONDS + len(self.rows) * ROW_SECONDS,
            ),
            "sweep": Part("sweep", 3, self._sweep, "random shapes for the rest of the time", 0.0),
            "e2e": Part("e2e", 3, self._e2e, "generate() of whole models", 0.0),
        }  # fmt: skip
        names = list(self.args.parts)
        if "trials" in names and "tests" not in names:
            names.insert(0, "tests")  # those of the trials
        return [found[name] for name in names]

    def collected(self) -> int | None:
        """Return how many tests there are, asked of pytest; None if it does not say."""
        if not self.tests:
            return 0
        command = self.pytest("--collect-only")
        done = subprocess.run(
            command, cwd=meta.ROOT, env={**os.environ, **self.environment()}, capture_output=True, text=True
        )
        chosen = re.findall(r"^(?:(\d+)/\d+|(\d+|no)) tests? collected", done.stdout, re.MULTILINE)
        (number,) = {a or b for a, b in chosen[-1:]} or {""}
        return 0 if number == "no" else int(number) if number else None


def _print_plan(plan: _Plan) -> None:
    args = plan.args
    print(f"campaign of {args.seconds:.0f} s into {args.out}, source {meta.source_hash()}")
    for note in plan.notes:
        print(f"note: {note}")
    shown = plan.parts(plan.collected())
    if plan.compile():
        print(f"compile: {len(plan.rows)} rows in {args.jobs} processes, beside the tests")
    left = args.seconds
    for index, part in enumerate(shown):
        allowed = parts.limit(shown, index, left)
        needed = f"about {part.seconds:.0f} s" if part.seconds else "as long as there is time"
        print(f"{part.name}: {part.items}; {needed}, at most {allowed:.0f} s")
        left -= min(allowed, part.seconds or allowed)
    names = dict.fromkeys(test.partition("::")[0] for test in plan.tests)
    print(f"on a machine without git: BENCH_COMMIT={meta.environment()['commit']} and --tests {' '.join(names)}")


@contextlib.contextmanager
def _ends_children() -> Iterator[None]:
    """Let a request to end this process leave all scopes, which ends its children."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    began = time.monotonic()
    plan = _Plan(args)
    if args.dry:
        _print_plan(plan)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("bench campaign: no CUDA device here; --dry prints the plan without one.", file=sys.stderr)
        return 2
    return begin(plan, began)


def begin(plan: _Plan, began: float) -> int:
    """Run the parts of a plan, within its time after `began`, and return the exit status."""
    if problem := _check_folder(plan):
        print(f"bench campaign: {problem}", file=sys.stderr)
        return 2
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # whatever this process was bound to
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with plan.log.open("a", encoding="utf-8", buffering=1) as file, _ends_children():

        def log(text: str) -> None:
            line = f"[{time.monotonic() - began:6.1f}] {text}"
            print(line, flush=True)
            file.write(f"{line}\n")

        file.write(f"source {meta.source_hash()}\n")
        commit = meta.environment()["commit"]
        log(f"commit {commit or 'unknown: set BENCH_COMMIT, or record in a checkout of the same sources'}")
        for note in plan.notes:
            log(note)
        left = plan.args.seconds - (time.monotonic() - began)
        good = parts.run_all(plan.parts(), plan.compile(), left, log, file.fileno(), plan.environment())
        for line in summary(plan.out):
            log(line)
    return 0 if good else 1


def _check_folder(plan: _Plan) -> str | None:
    """Return why the folder cannot take the results; create it otherwise."""
    if not plan.log.exists():
        plan.out.mkdir(parents=True, exist_ok=True)
        return None
    if not plan.args.resume:
        return f"{plan.out} has the results of a campaign; --resume continues it"
    was = _SOURCE.findall(plan.log.read_text(encoding="utf-8"))
    if was[-1:] != [meta.source_hash()]:
        return f"{plan.out} is of source {''.join(was[-1:])}; this is {meta.source_hash()}. Choose another --out"
    return None


def summary(folder: Path) -> list[str]:
    """Return lines about what a folder has: tests that failed, trials, rows."""
    lines = []
    if outcomes := plugin.outcomes(folder / "tests.log"):
        count = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
        lines.append("tests: " + ", ".join(f"{number} {kind}" for kind, number in count.items()))
        lines += [f"failed: {test}" for test, outcome in outcomes.items() if outcome == "failed"]
        lines += [f"did not end: {test}" for test, outcome in outcomes.items() if outcome == "began"]
    for file in ("trials.json", "rows.json", "sweep.json"):
        if (path := folder / file).exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            found = result.get("draws", result.get("rows", []))
            failed = [row for row in found if "failed" in row]
            lines.append(f"{file}: {len(found)} measured, {len(failed)} of them failed")
            lines += [f"failed: {row.get('row')} {row.get('shape')}: {row['failed']}" for row in failed]
            lines += trials.text(found) if file == "trials.json" else []
    return lines
