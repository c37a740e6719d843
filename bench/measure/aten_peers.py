"""Peers in ``python -m bench aten`` have a process of their own, which also measures torch's own operators.

FlagGems' gradient of layer norm reads outside of its tensors now and then, which makes the device unusable for its
process. So a case that ends the process counts as failed, the next one starts another process, and our times are taken
elsewhere. Cases go in and times come out as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

Case = tuple[str, tuple[int, ...], str]  # overload, shape, dtype

COMMAND = (sys.executable, "-m", "bench.measure.aten_peers")
STARTS = 3  # consecutive ends without an answer: there seems to be no peer


class Worker:
    """A process that measures cases; after its death the next case starts another one."""

    def __init__(self, command: Sequence[str] = COMMAND, seconds: float = 45.0) -> None:
        """Start it.

        Args:
            command: The process.
            seconds: After this time without an answer it is ended.
        """
        self._command, self._seconds = command, seconds
        self._unanswered = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def is_hopeless(self) -> bool:
        """True if the last processes all ended without one answer."""
        return self._unanswered >= STARTS

    def measure(self, case: Case, ways: tuple[str, ...], quick: bool) -> dict[str, Any]:
        """Return the times of each way, with torch's own in that process as its "torch"; or their errors."""
        if self._process.poll() is not None:
            self._process = self._start()
        process, line, why = self._process, "", "its process ended"
        try:
            process.stdin.write(json.dumps([*case, ways, quick]) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], self._seconds)[0]:
                line = process.stdout.readline()
            else:
                why = f"no answer in {self._seconds:.0f} s"
        except BrokenPipeError:
            pass
        if not line.endswith("\n"):
            self._unanswered += 1
            self.close()
            return {way: {"error": f"{why}, status {process.returncode}"} for way in ways}
        self._unanswered = 0
        answer = json.loads(line)
        if not answer["goes_on"]:
            self.close()
        found = answer["found"]
        return {way: found[way] | {"torch": found.get("torch", {})} for way in ways if way in found}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _device_works() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _serve() -> None:
    """Answer each line of standard input, until the device does not work any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print
    import torch

    from bench.measure import aten, aten_flaggems
    from bench.measure.timing import CudaDevice

    with contextlib.suppress(ImportError):
        aten_flaggems.library()  # while it waits for the first case
    clocks: dict[bool, Any] = {}
    for line in sys.stdin:
        name, shape, dtype, ways, quick = json.loads(line)
        if quick not in clocks:
            clocks[quick] = aten.timer(CudaDevice(), quick)
        row, clock, asked = aten.table.row_of(name), clocks[quick], ("torch", *ways)
        found = aten.measure_case(row, tuple(shape), getattr(torch, dtype), clock, asked, quick, compared=True)
        goes_on = _device_works()
        answers.write(json.dumps({"found": found, "goes_on": goes_on}) + "\n")
        answers.flush()
        if not goes_on:
            os._exit(1)  # an ordinary exit would wait for the device
        torch.cuda.empty_cache()


if __name__ == "__main__":
    _serve()
