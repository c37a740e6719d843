"""Command line of ``python -m bench sweep``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from pathlib import Path

from bench import meta
from bench.sweep import supervise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--draws", type=int, default=200, help="per family")
    parser.add_argument("--family", default="", help="regular expression on the names of families")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no draw after this time")
    parser.add_argument("--out", type=Path, default=Path("sweep.json"), help="result file; continued if it exists")
    parser.add_argument("--peers", help="comma-separated families of peers (default: all but inductor and flaggems)")
    parser.add_argument("--jit-draws", type=int, default=40, help="draws with peers that compile at a first call")
    parser.add_argument("--jit-seconds", type=float, default=25.0, help="of first calls, per peer and family")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile everything before; 0 for none")
    parser.add_argument("--compile-seconds", type=float, default=150.0, help="limit of these processes")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a call counts as hanging")
    parser.add_argument("--report", action="store_true", help="measure nothing; print the statistics of --out")
    parser.add_argument("--child", choices=("first", "next"), help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--after", type=int, default=0, help=argparse.SUPPRESS)


def _shared(args: argparse.Namespace) -> list[str]:
    """Return the options that processes of a sweep have in common."""
    given = {
        "--seed": args.seed, "--draws": args.draws, "--family": args.family, "--out": args.out,
        "--jit-draws": args.jit_draws, "--jit-seconds": args.jit_seconds,
    }  # fmt: skip
    if args.peers is not None:
        given["--peers"] = args.peers
    return [f"{name}={value}" for name, value in given.items()]


def _say(text: str) -> None:
    print(text, flush=True)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from bench.sweep import families, measure, statistics

    if args.report:
        try:
            _say(statistics.markdown(measure.load(args.out)))
        except meta.ResultError as error:
            print(f"bench sweep: {error}", file=sys.stderr)
            return 2
        return 0
    names = [name for name in families.FAMILIES if re.search(args.family, name)]
    if not names:
        known = ", ".join(families.FAMILIES)
        print(f"bench sweep: no family matches {args.family!r}; known: {known}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("bench sweep: no CUDA device here, so nothing is measured; --report works without one.", file=sys.stderr)
        return 2
    if args.part or args.child:
        return _process(args, names)
    try:
        file = measure.File(args.out, args.seed)
    except meta.ResultError as error:
        print(f"bench sweep: {error}", file=sys.stderr)
        return 2
    todo = sum(key not in file.done for key in measure.plan(names, args.draws))
    _say(f"{len(names)} families, {todo} draws to measure, {len(file.done)} in {args.out}")
    started, shared = time.monotonic(), _shared(args)
    if args.jobs and todo:
        supervise.compile_all(shared, args.jobs, min(args.compile_seconds, args.seconds / 2), _say)
    left = args.seconds - (time.monotonic() - started)
    status = supervise.measure_all(shared, file.marker, args.patience, left, _say) if todo else 0
    if args.out.exists():
        _say(statistics.markdown(measure.load(args.out)))
    return status


def _process(args: argparse.Namespace, names: list[str]) -> int:
    """Run one process of the sweep: ``--part i/n`` compiles, ``--child`` measures."""
    from bench.measure.run import DeviceLost
    from bench.measure.timing import CudaDevice, Timer
    from bench.sweep import measure

    warnings.filterwarnings("ignore")  # torch explains at length why a backend of its attention is not there
    ends = time.monotonic() + args.seconds
    wanted = measure.DEFAULT_PEERS if args.peers is None else [name for name in args.peers.split(",") if name]
    timer = Timer(CudaDevice(), iterations=measure.SAMPLES, warm_us=2000.0)
    budget = measure.Budget(args.jit_draws, args.jit_seconds)
    try:
        if args.part:
            part, parts = (int(number) for number in args.part.split("/"))
            sweep = measure.Sweep(timer, "cuda", args.seed, wanted, budget)
            mine = list(measure.plan(names, args.draws))[part::parts]
            for done, (family, index) in enumerate(mine):
                if time.monotonic() > ends:
                    break
                if done < args.after:
                    continue
                try:
                    sweep.try_warm(family, index)
                except DeviceLost:  # only a new process has a working device
                    left = f"{ends - time.monotonic():.1f}"
                    rest = ("--part", args.part, "--after", f"{done + 1}", "--seconds", left)
                    words = supervise.command(_shared(args), *rest)
                    os.execv(words[0], words)
            return 0
        file = measure.File(args.out, args.seed, after_loss=args.child == "next")
        sweep = measure.Sweep(timer, "cuda", args.seed, wanted, budget, file.mark)
        return 0 if measure.run(sweep, file, names, args.draws, ends, _say) else 1
    except DeviceLost as error:
        print(f"bench sweep: device lost: {error}", file=sys.stderr)
        return supervise.LOST
