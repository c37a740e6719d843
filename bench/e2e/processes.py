"""Arms in processes of their own, and timestamps on the device."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import meta

PATIENCE: float | None = None  # seconds to wait for others; None: without end
LOCK = "RTKERNELS_BENCH_LOCK"  # a file, for processes that were started at the same time; commands may share one


def add_model_options(parser: argparse.ArgumentParser, models: Iterable[str], arms: Sequence[str]) -> None:
    """Add the options that select the model and the arms."""
    parser.add_argument("--model", choices=models, default="dense")
    parser.add_argument("--arms", default=",".join(arms), help="comma-separated: " + ", ".join(arms))
    layers = "of the model; if left out, 24 of dense, 16 of moe, 4 to 6 of the others"
    parser.add_argument("--layers", type=int, help=layers)
    parser.add_argument("--vocab", type=int, default=151936)


def add_options(parser: argparse.ArgumentParser, out: str = "result file") -> None:
    """Add the options of benchmarks that measure each way in a process of its own."""
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU where there is no GPU")
    parser.add_argument("--together", action="store_true", help="start all at once; they do not measure at once")
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="keep what --out has, measure the rest")
    parser.add_argument("--one", help=argparse.SUPPRESS)


def one(run: Callable[[], dict[str, Any]], out: Path) -> int:
    """Write the record of this process's arm, also if its library is missing."""
    try:
        record = run()
    except ImportError as error:
        record = {"absent": str(error)}
    out.write_text(json.dumps(record))
    return 0


def records(
    module: str, arms: list[str], argv: list[str], together: bool, environment: dict[str, str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Run each arm by the same command line in a new process; yield arms with their records.

    One after the other, or all started `together`, so that imports, text and weights of all are prepared at the same
    time (inside of :func:`sharing`); measurements inside of :func:`alone` still run one after the other, but start
    times are then meaningless.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock = {LOCK: str(Path(folder) / "lock")} if together else {}
        environment = {**lock, **os.environ, **(environment or {})}
        started: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        for arm in arms if together else ():
            started[arm] = _started(module, arm, argv, folder, environment)
        for arm in () if together else arms:
            started[arm] = _started(module, arm, argv, folder, environment)
            started[arm][0].wait()
            yield arm, _record_of(started[arm][1])
        while together and started:  # in the order in which they end, so that a failing one does not lose the others
            ended = [arm for arm, (process, _) in started.items() if process.poll() is not None]
            for arm in ended:
                yield arm, _record_of(started.pop(arm)[1])
            if not ended:
                time.sleep(0.05)


def _record_of(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text()) if out.exists() else {"failed": _errors(out).read_text()[-2000:]}


def begun(out: Path | None, goes_on: bool, head: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the same command in a file, without failed arms; a new one if there is none.

    `head` must be equal in both: what was run, and its sizes; and so must the sources.
    """
    if not goes_on or out is None or not out.exists():
        return {**head, "arms": {}}
    found = json.loads(out.read_text())
    if {name: found.get(name) for name in head} != head:
        raise SystemExit(f"{out} is of another command; expected {head}")
    check_source(found, out)
    return {**found, "arms": {arm: record for arm, record in found["arms"].items() if "failed" not in record}}


def check_source(found: dict[str, Any], out: Path) -> None:
    """End the command if a file that is to be continued was measured of other sources."""
    try:
        meta.check_source(found.get("environment"), out)
    except meta.ResultError as error:
        raise SystemExit(str(error)) from error


def write(out: Path | None, result: dict[str, Any]) -> None:
    """Write atomically: if this process is killed, the file is complete."""
    if out is not None:
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(result, indent=1))
        part.replace(out)


def _started(module: str, arm: str, argv: list[str], folder: str, environment: dict[str, str]) -> Any:
    out = Path(folder) / f"{arm}.json"
    command = [sys.executable, "-m", module, *_without_out(argv), "--one", arm, "--out", str(out)]
    with _errors(out).open("w") as errors:  # no pipe: nobody would read it while waiting for others
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors), out


def _errors(out: Path) -> Path:
    return out.with_suffix(".err")


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process that was started together with this one measures, or uses the device at all."""
    with _locked(exclusive=True):
        yield


@contextmanager
def sharing() -> Iterator[None]:
    """Wait until no process measures, for work on the device that is not measured.

    Processes share the device in time slices, so one that initialises its weights slows down one that measures.
    """
    with _locked(exclusive=False):
        yield


@contextmanager
def _locked(exclusive: bool) -> Iterator[None]:
    path = os.environ.get(LOCK)
    if path is None:
        yield
        return
    import fcntl

    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    with open(path, "w") as file:
        if PATIENCE is None:
            fcntl.flock(file, kind)
        else:
            _wait_for(lambda: fcntl.flock(file, kind | fcntl.LOCK_NB), PATIENCE)
        yield


@contextmanager
def limited(place: Any, seconds: float) -> Iterator[None]:
    """Enter a place, then end this process with a traceback if it takes longer; waiting for the place does not count.

    A process that hangs would keep all others from the device.
    """
    with place:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _wait_for(lock: Callable[[], None], seconds: float) -> None:
    """Take a lock; after some seconds, say so and go on without it."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            return lock()
        except BlockingIOError:
            time.sleep(0.01)
    print(f"the device was not free for {seconds:g} s; going on without waiting", file=sys.stderr, flush=True)


def _without_out(argv: list[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        if not skip and word not in ("--out", "--continue"):
            kept.append(word)
        skip = word == "--out"
    return kept


def mark(device: str) -> Any:
    """Return a timestamp: an event on the device, or the time."""
    if device == "cpu":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a: Any, b: Any) -> float:
    """Return the milliseconds between two timestamps."""
    return (b - a) * 1000 if isinstance(a, float) else a.elapsed_time(b)


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
