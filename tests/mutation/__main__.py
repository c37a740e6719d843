"""``python -m tests.mutation``: judge mutants by tests, choose tests by mutants."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def run(args: argparse.Namespace) -> int:
    """Run tests against mutants; results are lines of JSON, one a test."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import pytest

    from mutation.plugin import FOLDERS

    os.chdir(TESTS.parent)
    without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "faulthandler", "xdist")]
    options = ["-q", "-s", "-p", "mutation.plugin", *without, "--whole", f"--mutation-out={args.out}",
               f"--mutation-jobs={args.jobs}", f"--mutation-seconds={args.seconds}"]  # fmt: skip
    options += [f"--mutation-tests={args.tests}"] if args.tests else []
    options += [f"--mutation-mutants={args.mutants}"] if args.mutants else []
    options += [f"--mutation-tries={args.tries}"] if args.tries else []
    options = [*(["--mutation-known", *map(str, args.known)] if args.known else []), *options]  # takes all that follow
    return int(pytest.main([*options, *(args.only or FOLDERS)]))


def show(args: argparse.Namespace) -> int:
    """Print mutants."""
    from mutation import mutator

    for name, mutant in mutator.all_mutants().items():
        if any(word in name for word in args.words) or not args.words:
            print(mutant)
    return 0


def choose(args: argparse.Namespace) -> int:
    """Choose samples from results of runs; write them and the record."""
    from mutation import choose as chooser
    from mutation.plugin import results

    there = chooser.collected()
    found = [result for result in results(args.results) if result["test"] in there]
    tests = chooser.read(found)
    chosen, seconds = chooser.choose(tests, args.per_mutant)
    print(f"{len(tests)} tests judged, {len(chosen)} chosen, {seconds:.0f} s")
    counts = chooser.write(tests, chosen, chooser.reached(found))
    judged = sum(counts.values()) - counts["never_reached"]
    print(", ".join(f"{key} {count} ({count / judged:.1%})" for key, count in counts.items()))
    return 0


def add(args: argparse.Namespace) -> int:
    """Add the kills and the survivors of a run with --mutants to the record, the tests that kill to the samples."""
    from mutation import choose as chooser
    from mutation.plugin import results

    there = chooser.collected()
    found = [result for result in results(args.results) if result["test"] in there]
    tests = chooser.read(found)
    chosen, seconds = chooser.choose(tests, args.per_mutant)
    counts = chooser.add(tests, chosen, chooser.reached(found))
    print(f"{len(tests)} tests judged, {len(chosen)} chosen, {seconds:.0f} s; {counts}")
    return 0


def replay(args: argparse.Namespace) -> int:
    """Check that recorded tests kill some recorded mutants now."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import json

    import pytest

    from mutation import replay as replayer

    os.chdir(TESTS.parent)
    chosen = replayer.drawn(args.seed, args.count, args.cheap)
    options = ["-q", "-s", "-p", "mutation.replay", "-pno:cacheprovider", "-pno:faulthandler", "-pno:xdist", "--full"]
    return int(pytest.main([*options, f"--replayed={json.dumps(chosen)}", *dict.fromkeys(chosen.values())]))


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help=run.__doc__)
    command.add_argument("--jobs", type=int, default=os.cpu_count())
    command.add_argument("--seconds", type=float, default=1e9)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--known", type=Path, nargs="*", help="results of earlier runs, to go on from")
    command.add_argument("--tests", type=Path, help="file with the node ids of the only tests to run")
    command.add_argument("--mutants", type=Path, help="file with the names of the only mutants to judge")
    command.add_argument("--tries", type=int, help="tests that may leave a mutant alive before it is given up")
    command.add_argument("only", nargs="*", help="files or folders of tests")
    command.set_defaults(do=run)
    command = commands.add_parser("choose", help=choose.__doc__)
    command.add_argument("--per-mutant", type=float, default=0.8, metavar="SECONDS", help="that a kill may cost")
    command.add_argument("results", type=Path, nargs="+")
    command.set_defaults(do=choose)
    command = commands.add_parser("add", help=add.__doc__)
    command.add_argument("--per-mutant", type=float, default=0.8, metavar="SECONDS", help="that a kill may cost")
    command.add_argument("results", type=Path, nargs="+")
    command.set_defaults(do=add)
    command = commands.add_parser("replay", help=replay.__doc__)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--count", type=int, default=3)
    command.add_argument("--cheap", action="store_true", help="only tests that take less than a second")
    command.set_defaults(do=replay)
    command = commands.add_parser("show", help=show.__doc__)
    command.add_argument("words", nargs="*")
    command.set_defaults(do=show)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    raise SystemExit(main())
