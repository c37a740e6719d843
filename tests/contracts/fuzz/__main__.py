"""Runs the fuzzer: ``python -m tests.contracts.fuzz --device cuda --seconds 120 --seed 1``.

Processes share the calls among themselves. If a process dies (for example of a lost CUDA context), its current case has
failed, and the next process continues after it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

PASSED_ON = ("device", "seed", "jobs", "only", "variation", "kinds")
TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.contracts.fuzz", description=__doc__)
    parser.add_argument("--device", default="sm_90", choices=("cpu", "sm_80", "sm_90", "cuda"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    parser.add_argument("--variation", default="", help="only this one, as reports name it")
    parser.add_argument("--kinds", default="own aten", help="own, aten, or both")
    parser.add_argument("--rows", type=int, default=40, help="how many failures are printed")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(given: argparse.Namespace) -> None:
    """Run one part and print a line for every started case and every failure."""
    import torch
    from support.compare import poisoned

    from contracts.fuzz import campaign

    def begun(number: int, name: str) -> None:
        print(json.dumps({"at": number, "name": name}), flush=True)

    torch.set_num_threads(1)
    with poisoned():
        for failure in campaign.run(
            given.device, given.seed, given.seconds, part=given.part, parts=given.jobs, start=given.start,
            only=given.only, variation=given.variation, repeat=3 if given.device == "cuda" else 1, kinds=given.kinds,
            begun=begun,
        ):  # fmt: skip
            if failure is not None:
                print(json.dumps({"failure": failure}), flush=True)


class Part(threading.Thread):
    """The processes of one part, one after the other."""

    def __init__(self, given: argparse.Namespace, part: int) -> None:
        super().__init__()
        self.given, self.part, self.cases, self.crashes = given, part, 0, 0
        self.failures: list[list[str]] = []

    def run(self) -> None:
        """Start processes until one finishes."""
        end, start = time.monotonic() + self.given.seconds, 0
        while time.monotonic() < end and self.crashes < 50:
            left = f"{max(end - time.monotonic(), 1):.0f}"
            command = [
                sys.executable, "-m", "tests.contracts.fuzz", f"--part={self.part}", f"--start={start}",
                f"--seconds={left}", *(f"--{name}={getattr(self.given, name)}" for name in PASSED_ON),
            ]  # fmt: skip
            at = self._follow(command)
            if at is None:
                return
            start = at

    def _follow(self, command: list[str]) -> int | None:
        """Read what a process prints; return the number of the case that ended it, None if none did."""
        from support.interpreter import environment

        at, name = None, ""
        process = subprocess.Popen(
            command, cwd=TESTS.parent, env=environment(TESTS.parent, TESTS, OMP_NUM_THREADS="1"), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr))
        reader.start()
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if "at" in told:
                at, name, self.cases = told["at"], told["name"], self.cases + 1
            else:
                self.failures.append(told["failure"])
        status = process.wait()
        reader.join()
        if status == 0:
            return None
        self.crashes += 1
        last = next((line.strip() for line in reversed(errors) if "Error" in line), f"status {status}")
        self.failures.append([*name.partition(" | ")[::2], f"the process ended: {last[:200]}"])
        return at


def _has_samples() -> bool:
    """Return whether torch's OpInfos can be imported."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> int:
    """Run all parts and print the failures."""
    given = _arguments()
    if given.part is not None:
        work(given)
        return 0
    if "aten" in given.kinds and not _has_samples():
        print("without aten overloads: torch's OpInfos need the package expecttest")
        given.kinds = "own"
    parts = [Part(given, part) for part in range(given.jobs)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    failures = [failure for part in parts for failure in part.failures]
    seen: dict[tuple[str, str], int] = {}
    for call, variation, what in failures:
        kind = (call, what[:40])
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] == 1 and len(seen) <= given.rows:
            print(f"{call} | {variation} | {what[:150]}")
            print(f"    python -m tests.contracts.fuzz --device {given.device} --seed {given.seed} --seconds 30 "
                  f"--only {call!r} --variation {variation!r}")  # fmt: skip
    print(f"{sum(part.cases for part in parts)} cases, {len(failures)} failures of {len(seen)} kinds, "
          f"{sum(part.crashes for part in parts)} ended processes, seed {given.seed}, {given.device}")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
