"""Processes of a sweep: several that compile, then one that measures and is replaced when a call breaks it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MAX_RESTARTS = 40
POLL_SECONDS = 0.5
LOST = 3  # exit status of a process whose device no longer answers


def command(arguments: list[str], *extra: str) -> list[str]:
    """Return the command line of a process of this sweep."""
    return [sys.executable, "-m", "bench", "sweep", *arguments, *extra]


def compile_all(arguments: list[str], jobs: int, seconds: float, log: Callable[[str], None]) -> None:
    """Let `jobs` processes call every kernel and peer once; those that need longer than `seconds` are ended."""
    ends = time.monotonic() + seconds
    started = time.monotonic()
    workers = [
        subprocess.Popen(command(arguments, "--part", f"{i}/{jobs}", "--seconds", f"{seconds:g}"))
        for i in range(jobs)
    ]  # fmt: skip
    for worker in workers:
        try:
            worker.wait(max(0.1, ends + 15 - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    log(f"compiled for {time.monotonic() - started:.0f} s in {jobs} processes")


def _wait(child: subprocess.Popen[bytes], marker: Path, patience: float, ends: float) -> int:
    """Wait for a process and return its status; end it when its marker was not touched for `patience` seconds."""
    touched = time.time()
    while True:
        try:
            return child.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        try:
            touched = max(touched, marker.stat().st_mtime)
        except OSError:
            pass
        if time.time() - touched > patience or time.monotonic() > ends + patience:
            child.kill()
            child.wait()
            return -9


def measure_all(
    arguments: list[str], marker: Path, patience: float, seconds: float, log: Callable[[str], None]
) -> int:  # fmt: skip
    """Let one process after another measure until all is done or the time is over; return the last status.

    Args:
        arguments: Of the command line.
        marker: File that a process touches before each call.
        patience: Seconds without a touch after which a process is ended; it compiles in that time, too.
        seconds: Time limit of all processes together.
        log: Receives a line per replaced process.
    """
    ends = time.monotonic() + seconds
    status = 1
    for attempt in range(MAX_RESTARTS):
        left = ends - time.monotonic()
        if left <= 0:
            break
        child = subprocess.Popen(
            command(arguments, "--child", "next" if attempt else "first", "--seconds", f"{left:.1f}")
        )
        status = _wait(child, marker, patience, ends)
        if status in (0, 1, 2):
            break
        log(f"bench sweep: the measuring process ended with {status}; another one continues")
    return status
