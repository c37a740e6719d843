"""Parts of a campaign: each is a command with a share of the time, and what it wrote is valid whenever it is ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench import meta

MIN_SECONDS = 10.0  # below which a part is not begun
GRACE_SECONDS = 3.0  # between the request to end and the end
Log = Callable[[str], None]


class Part(NamedTuple):
    """A command that ends itself after `seconds`, or is ended a little later.

    Attributes:
        name: As ``--parts`` has it.
        weight: Share of the time that is left, against those of the parts behind it.
        command: Returns the words of the command line for a number of seconds; empty if there is nothing to do.
        items: What it does, counted, for the plan.
        seconds: Estimate of the time for all of it.
        log: File that takes its output; that of the campaign if None.
        measures: No other process may use the device meanwhile.
    """

    name: str
    weight: float
    command: Callable[[float], list[str]]
    items: str
    seconds: float
    log: Path | None = None
    measures: bool = True


def python(*words: str) -> list[str]:
    """Return the command line of a module of this tree."""
    return [sys.executable, "-u", "-m", *words]


def limit(parts: list[Part], index: int, left: float) -> float:
    """Return the seconds of a part: its share of those left, so that what a part does not use goes to the next ones."""
    return left * parts[index].weight / sum(part.weight for part in parts[index:])


def _quiet() -> None:
    os.setpgrp()
    os.nice(19)


def started(command: list[str], environment: dict[str, str], *, output: int, lowest: bool) -> subprocess.Popen[bytes]:
    """Start a command in a group of its own, so that it can be ended with all of its processes, but not in a session
    of its own, in which it would survive this machine's end of the command."""
    return subprocess.Popen(
        command, cwd=meta.ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, preexec_fn=_quiet if lowest else os.setpgrp,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and everything that it has started."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a command when the scope is left, however."""
    try:
        yield process
    finally:
        end(process)


def run(part: Part, command: list[str], seconds: float, log: Log, environment: dict[str, str]) -> int | None:
    """Run a part and pass on each line of its output at once; return its exit status, None if it was cut off."""
    ends = time.monotonic() + seconds
    rest = b""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(ended(started(command, environment, output=subprocess.PIPE, lowest=False)))
        file = stack.enter_context(part.log.open("a", encoding="utf-8", buffering=1)) if part.log else None
        chosen = stack.enter_context(selectors.DefaultSelector())
        chosen.register(process.stdout, selectors.EVENT_READ)
        while (left := ends - time.monotonic()) > 0:
            if not chosen.select(left):
                break
            data = os.read(process.stdout.fileno(), 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else filter(None, [rest]):
                text = line.decode(errors="replace")
                if file:
                    file.write(f"{text}\n")
                    print(text, flush=True)
                elif text:
                    log(text)
            if not data:
                return process.wait()
    return None


def run_all(
    parts: list[Part], compiling: list[str], seconds: float, log: Log, record: int, environment: dict[str, str]
) -> bool:  # fmt: skip
    """Run one part after the other, beside the first ones the command that compiles; return whether all succeeded.

    Args:
        parts: In this order.
        compiling: Command that runs at the lowest priority until a part measures; empty for none.
        seconds: For all of them.
        log: Receives a line at a time.
        record: File descriptor that takes the output of `compiling`.
        environment: Added to that of this process.
    """
    ends, good = time.monotonic() + seconds, True
    with contextlib.ExitStack() as stack:
        compiler = None
        if compiling:
            compiler = started(compiling, environment, output=record, lowest=True)
            stack.enter_context(ended(compiler))
        for index, part in enumerate(parts):
            if part.measures and compiler is not None:
                _wait(compiler, limit(parts, index, ends - time.monotonic()) / 3, log)
                compiler = None
            allowed = limit(parts, index, ends - time.monotonic() - GRACE_SECONDS)
            if allowed < MIN_SECONDS:
                log(f"{part.name}: not begun, {allowed:.0f} s are left")
                good = False
                continue
            command = part.command(allowed)
            if not command:
                log(f"{part.name}: nothing to do")
                continue
            log(f"{part.name}: {part.items}, at most {allowed:.0f} s")
            began = time.monotonic()
            status = run(part, command, allowed, log, environment)
            said = "cut off" if status is None else f"ended with {status}"
            log(f"{part.name}: {said} after {time.monotonic() - began:.0f} s")
            good &= status == 0
    return good


def _wait(process: subprocess.Popen[bytes], seconds: float, log: Log) -> None:
    """Let the compilation end, in a part's time, before the part measures."""
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    end(process)
    log(f"compile: ended with {process.returncode}, waited {time.monotonic() - began:.0f} s for it")
