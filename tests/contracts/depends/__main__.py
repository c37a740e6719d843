"""``python -m contracts.depends``, with ``tests`` on the path: check calls; print failures and a count as JSON."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import warnings


def main() -> int:
    """Check some calls or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("public", "aten"), default="public")
    parser.add_argument("--calls", default="", help="a part of the names of calls")
    parser.add_argument("--items", default="", help="names of items, with commas")
    parser.add_argument("--changes", default="", help="a part of the names of changes")
    parser.add_argument("--count", type=int, help="calls, at random")
    parser.add_argument("--each", type=int, help="changes of each item, at random")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="which part of the calls")
    parser.add_argument("--fresh", type=int, default=0, help="changes that are compared with a fresh process")
    parser.add_argument("--old-plans", action="store_true", help="plans of numbers that are equal are not cleared")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--plant", help="the name of a defect in planted.py")
    options = parser.parse_args()
    if options.plant:
        from contracts.depends import planted

        planted.plant(options.plant)
    print(json.dumps(run(options)))
    return 0


def run(options: argparse.Namespace) -> dict[str, object]:
    """Return what was found."""
    from contracts.depends import device

    device.install()
    from contracts.depends import calls
    from contracts.depends.changes import changes
    from contracts.depends.check import Checker, fresh

    warnings.simplefilter("ignore")
    rng, end = random.Random(options.seed), time.monotonic() + options.seconds
    found = calls.chosen(options.kind, options.calls, rng, options.count, *map(int, options.part.split("/")))
    wanted = set(filter(None, options.items.split(",")))
    checker, failures, names = Checker(), [], []
    compared = 0
    checker.new_plans = not options.old_plans
    for call in found:
        names.append(call.name)
        by_item: dict[str, list] = {}
        for change in changes(call, random.Random(f"{options.seed} {call.name}")):
            if (not wanted or change.item in wanted) and options.changes in change.name:
                by_item.setdefault(change.item, []).append(change)
        for some in by_item.values():
            each = 1 if call.name in calls.TOO_SLOW else options.each
            for change in some if each is None or len(some) <= each else rng.sample(some, each):
                if time.monotonic() > end:
                    break
                if compared < options.fresh:
                    compared += 1
                    if (child := _in_a_fresh_process(call, change)) != (here := repr(fresh(call, change.after))):
                        failures.append(
                            f"{call.name} | {change.name} | a fresh process: {child[:300]}, not {here[:300]}"
                        )
                began = time.monotonic()
                if wrong := checker.check(call, change):
                    failures.append(wrong)
                if options.verbose:
                    taken = time.monotonic() - began
                    print(f"{taken:.2f} {wrong or f'{call.name} {change.item} {change.name}'}", file=sys.stderr)
    return {
        "failures": failures, "calls": names, "changes": checker.changes, "replayed": checker.replayed,
        "items": sorted(checker.items), "compared": compared,
    }  # fmt: skip


def _in_a_fresh_process(call: object, change: object) -> str:
    """Return the outcome of a call in a child, which has made none before if this process has not."""
    from contracts.depends.check import outcome

    read, write = os.pipe()
    if not (pid := os.fork()):
        with os.fdopen(write, "w") as pipe:
            try:
                pipe.write(repr(outcome(call, change.after)))
            except BaseException as error:
                pipe.write(f"no outcome: {error}")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


if __name__ == "__main__":
    raise SystemExit(main())
