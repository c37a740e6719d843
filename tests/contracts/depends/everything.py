"""``python -m contracts.depends.everything``: all calls and changes, in many processes; continues where it stopped.

First one change of each item for every call, slow calls first, so that every pair of a call and an item is checked
early; then the other changes, those of slow calls last. What is done is kept in a file: a run of the same sources that
was cut goes on from there, and sums up all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import selectors
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

KINDS = ("public", "aten")
_LIMIT = 240  # seconds of a unit of work: some changes of one call


def main() -> int:
    """Check everything that is not done yet; 0 if nothing was wrong and nothing is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after this time")
    parser.add_argument("--state", type=Path, default=Path("depends.jsonl"), help="what is done")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--calls", default="", help="parts of the names of calls, with |")
    parser.add_argument("--worker", choices=KINDS)
    options = parser.parse_args()
    if options.worker:
        return _work(options.worker)
    return _Run(options).run()


# ---- one process of many --------------------------------------------------------------------------------------------


def _work(kind: str) -> int:
    """Answer lines of standard input: the names of all calls first, then what was found by a unit of work."""
    from contracts.depends import device

    device.install()
    from contracts.depends import calls
    from contracts.depends.changes import changes
    from contracts.depends.check import Checker

    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a call prints
    makers = calls.aten() if kind == "aten" else calls.public()
    slow = {name for name in makers if name in calls.TOO_SLOW}
    print(json.dumps({"names": [*makers], "slow": sorted(slow)}), file=answers, flush=True)
    for line in sys.stdin:
        name, number, item, until = json.loads(line)
        call = makers[name]()
        by_item: dict[str, list[Any]] = {}
        for change in changes(call, random.Random(f"0 {name}")) if call is not None else ():
            by_item.setdefault(change.item, []).append(change)
        checker, failures, cut = Checker(), [], 0
        pairs = set()
        for one, some in by_item.items():
            first = random.Random(f"{name} {one}").randrange(len(some))
            for i, change in enumerate(some):
                if (i == first) != (number == 0) or (item and one != item):
                    continue
                if time.time() > until:
                    cut += 1
                    continue
                pairs.add(one)
                if wrong := checker.check(call, change):
                    failures.append(wrong)
        counts = {"changes": checker.changes, "replayed": checker.replayed, "cut": cut, "items": sorted(by_item)}
        print(json.dumps({"failures": failures, "pairs": sorted(pairs), **counts}), file=answers, flush=True)
    return 0


class _Worker:
    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", __spec__.name, f"--worker={kind}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        for line in self._process.stderr:
            self._errors = [*self._errors[-40:], line.rstrip()]

    def answer(self, unit: Any, seconds: float) -> dict[str, Any]:
        """Return what a unit of work found; a process that ends or takes too long is a failure."""
        if unit is not None:
            self._process.stdin.write(json.dumps(unit) + "\n")
            self._process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if ready.select(seconds) else ""
        if line:
            return json.loads(line)
        late = self._process.poll() is None
        self.stop()
        why = f"no answer in {seconds:.0f} s" if late else " ".join(self._errors[-3:])
        return {"lost": f"late: {why}" if late else f"ended with {self._process.returncode}: {why[-300:]}"}

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


# ---- all of them ----------------------------------------------------------------------------------------------------


def _source() -> str:
    """Return a hash of what is checked and of what checks it: results of other sources are no results of these."""
    root, digest = Path(__file__).parents[3], hashlib.sha256()
    for folder, pattern in (("rtkernels", "*.py"), ("cuda_src", "*.cu*"), ("tests/contracts", "*.py")):
        for path in sorted((root / folder).rglob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class _Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._end = options, time.time() + options.seconds
        self._lock, self._began = threading.Lock(), time.time()
        lines = options.state.read_text().splitlines() if options.state.exists() else []
        self._source = _source()
        found = [one for one in map(json.loads, lines) if one.get("source") == self._source]
        self._done = {tuple(one["unit"]): one for one in found}
        self._state = options.state.open("a")

    def run(self) -> int:
        """Run all units."""
        units, total = queue.Queue(), 0
        names = {kind: _Worker(kind) for kind in self._options.kinds.split(",")}
        for kind, worker in names.items():
            names[kind] = worker.answer(None, 300)
            worker.stop()
            if "lost" in names[kind]:
                print(f"{kind}: {names[kind]['lost']}")
                return 1
        for unit in self._units(names):
            total += 1
            if tuple(unit) not in self._done:
                units.put(unit)
        print(f"{total} units of work, {units.qsize()} to do", flush=True)
        threads = [threading.Thread(target=self._serve, args=(units,)) for _ in range(self._options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._sum_up(names, units.qsize())

    def _units(self, names: dict[str, Any]) -> Any:
        from rtkernels.runtime.depends import ITEMS

        parts = self._options.calls.split("|")
        chosen = {kind: [n for n in found["names"] if any(p in n for p in parts)] for kind, found in names.items()}
        slow = {kind: {*found["slow"]} for kind, found in names.items()}
        for kind, some in chosen.items():
            yield from ([kind, name, 0, item] for name in some if name in slow[kind] for item in ITEMS)
        for number in (0, 1):
            for kind, some in chosen.items():
                yield from ([kind, name, number, ""] for name in some if name not in slow[kind])
        for kind, some in chosen.items():
            yield from ([kind, name, 1, item] for name in some if name in slow[kind] for item in ITEMS)

    def _serve(self, units: queue.Queue) -> None:
        workers: dict[str, _Worker] = {}
        while time.time() < self._end:
            try:
                unit = units.get_nowait()
            except queue.Empty:
                break
            kind, name, number, item = unit
            if kind not in workers:
                workers[kind] = _Worker(kind)
                started = workers[kind].answer(None, 300)
                if "lost" in started:
                    self._record(unit, started, 0.0)
                    del workers[kind]
                    continue
            began = time.time()
            until = min(self._end, began + _LIMIT)
            found = workers[kind].answer([name, number, item, until], until - began + 60)
            if "lost" in found:
                del workers[kind]
            self._record(unit, found, time.time() - began)
        for worker in workers.values():
            worker.stop()

    def _record(self, unit: list[Any], found: dict[str, Any], took: float) -> None:
        with self._lock:
            found = {"unit": unit, "source": self._source, "seconds": round(took, 1), **found}
            self._done[tuple(unit)] = found
            if not (found.get("cut") or found.get("failures") or "lost" in found):  # others are tried again
                print(json.dumps(found), file=self._state, flush=True)
            if len(self._done) % 50 == 0:
                print(f"{time.time() - self._began:.0f} s: {len(self._done)} units", flush=True)
            for wrong in [*found.get("failures", ()), *([found["lost"]] if "lost" in found else ())]:
                print(f"FAIL {unit[0]} {unit[1]} {unit[3]}: {wrong[:300]}", flush=True)

    def _sum_up(self, names: dict[str, Any], left: int) -> int:
        wrong = cut = 0
        for kind, found in names.items():
            some = [one for one in self._done.values() if one["unit"][0] == kind]
            ran = {(one["unit"][1], item) for one in some for item in one.get("pairs", ())}
            items = {(one["unit"][1], item) for one in some for item in one.get("items", ())}
            lost = [one for one in some if "lost" in one]
            failures = sum(len(one.get("failures", ())) for one in some)
            wrong += failures + len(lost)
            functions = {name.partition(",")[0] for name, _ in ran}
            counts = {key: sum(one.get(key, 0) for one in some) for key in ("changes", "replayed", "cut")}
            cut += counts["cut"]
            print(
                f"{kind}: {len(functions)} functions, {len({name for name, _ in ran})} of {len(found['names'])} calls, "
                f"{len({item for _, item in ran})} items, {len(ran)} pairs of {len(items)}, {counts['changes']} "
                f"changes, {counts['replayed']} of them of replayed calls, {counts['cut']} cut, {failures} failures, "
                f"{len(lost)} units lost, {sum(one['seconds'] for one in some):.0f} s of work"
            )
            if missing := sorted(items - ran):
                print(f"  not run: {', '.join(f'{name} {item}' for name, item in missing[:20])}")
            slowest = sorted(some, key=lambda one: -one["seconds"])[:5]
            print("  slowest: " + ", ".join(f"{one['unit'][1]} {one['unit'][3]} {one['seconds']} s" for one in slowest))
        print(f"{left} units not begun, {time.time() - self._began:.0f} s")
        return int(bool(wrong or left or cut))


if __name__ == "__main__":
    raise SystemExit(main())
