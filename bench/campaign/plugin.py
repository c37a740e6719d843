"""pytest plugin of ``bench campaign``: a line per test as soon as it ends, a time limit, and what to run first.

A test that hangs, or that breaks the device, ends its worker, which pytest-xdist replaces; only this test fails. Lines
go to the standard output of the whole run, whatever pytest captures.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Environment: paths in order; tests that passed before are in the first bytes of a log; seconds of a test.
PATHS, LOG, BYTES, LIMIT = (f"BENCH_CAMPAIGN_{name}" for name in ("PATHS", "LOG", "BYTES", "TEST_SECONDS"))
LINE = re.compile(r"^(began|passed|failed|skipped) +[0-9.]+ s (.+)$")
# Before pytest captures them; inherited by workers.
_OUT, _ERRORS = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))


def outcomes(log: Path, size: int | None = None) -> dict[str, str]:
    """Return the last outcome of each test that a log, or its first bytes, have; "began" if its end is not there."""
    text = log.read_bytes()[:size].decode(errors="replace") if log.exists() else ""
    found = map(LINE.match, text.splitlines())
    return {line[2]: line[1] for line in found if line}


def _rank(node: str, paths: list[str]) -> int:
    return next((i for i, path in enumerate(paths) if re.match(rf"{re.escape(path)}(?![\w.])", node)), len(paths))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that passed before, and begin with those of the paths that were named first."""
    # Workers must agree, also one that replaces another while the log grows.
    before = outcomes(Path(os.environ[LOG]), int(os.environ[BYTES]))
    done = {node for node, outcome in before.items() if outcome == "passed"}
    paths = os.environ[PATHS].split()
    hung = {node for node, outcome in before.items() if outcome == "began"}  # or was cut off: last, so others run
    kept = [item for item in items if item.nodeid not in done]
    kept.sort(key=lambda item: (item.nodeid in hung, _rank(item.nodeid, paths)))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing is left to run: that is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """End the process if a test takes too long, even one that waits for the device."""
    faulthandler.dump_traceback_later(float(os.environ[LIMIT]), exit=True, file=_ERRORS)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _is_lost() -> bool:
    """Return whether the device of this process no longer answers."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def pytest_runtest_logstart(nodeid: str) -> None:
    """Print that a test begins: one that hangs has no other line."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _OUT.write(f"began   0.00 s {nodeid}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    """Print how a test ended; in a worker, end the process if its device is lost, before other tests fail there."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        if report.failed and _is_lost():
            _ERRORS.write(f"device lost in {report.nodeid}\n{report.longreprtext}\n")
            os._exit(1)
    elif report.when not in ("setup", "teardown") or report.outcome != "passed":
        if report.when == "teardown" and report.skipped:
            return
        text = "".join(f"\n    {line}" for line in report.longreprtext.splitlines()) if report.failed else ""
        _OUT.write(f"{report.outcome:7} {getattr(report, 'duration', 0.0):.2f} s {report.nodeid}{text}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> tuple[str, str, str]:
    """No dots: the lines above say it."""
    counted = report.failed or report.when == "call" or (report.when == "setup" and report.skipped)
    return (report.outcome if counted else "", "", "")
