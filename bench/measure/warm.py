"""Compilation before a recorded run: processes that call ours and every peer of each row once.

What they compile is found by the process that measures: the cache of our kernels, Triton's, inductor's, and those of
the CuTe libraries are on disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from bench.e2e import processes
from bench.measure.run import Bench, DeviceLost, _release, forward_of
from bench.rows.row import Row


def options(args: argparse.Namespace) -> list[str]:
    """Return the options of ``bench run`` that choose rows and peers."""
    given = [f"--rows={args.rows}"] if args.rows is not None else []
    if args.peers is not None:
        given.append(f"--peers={','.join(args.peers) or 'none'}")
    given += [f"--trial={switch}" for switch in args.trial or ()]
    flags = ("missing", "without_peak", "compile")
    return [*given, *(f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag))]


def all_parts(arguments: list[str], jobs: int, seconds: float) -> None:
    """Start `jobs` processes with a part of the rows each, and end those that need longer than `seconds`."""
    started = time.monotonic()
    command = [sys.executable, "-m", "bench", "run", *arguments, f"--seconds={seconds:g}"]
    workers = [subprocess.Popen([*command, f"--part={i}/{jobs}"]) for i in range(jobs)]
    for worker in workers:
        try:
            worker.wait(max(0.1, started + seconds + 15 - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    print(f"compiled for {time.monotonic() - started:.0f} s in {jobs} processes", flush=True)


def part(
    rows: list[Row], which: str, bench: Bench, pool: list[Row], seconds: float, *, shares_device: bool = False
) -> int:  # fmt: skip
    """Call ours and every peer of a part of the rows, ``"0/6"``; return the exit status.

    `shares_device`: All parts together leave half of the device's memory to other commands; larger rows fail.
    """
    ends = time.monotonic() + seconds
    index, parts = (int(number) for number in which.split("/"))
    if shares_device:
        torch.cuda.set_per_process_memory_fraction(0.5 / parts)
    for row in rows[index::parts]:
        if time.monotonic() > ends:
            break
        try:
            with processes.sharing():
                bench.warm(row, forward_of(row, pool))
        except DeviceLost:
            return 1
        except Exception as error:  # of the inputs; the measurement tells it
            bench.log(f"not compiled: {row.label}: {type(error).__name__}")
        _release()
    return 0
