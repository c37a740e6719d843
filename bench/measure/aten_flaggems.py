"""FlagGems in ``python -m bench aten``: which overloads it has, and its Triton kernels compiled before they are timed.

Compiling takes seconds of a case, timing milliseconds. So processes that share Triton's cache first call each case once
(``python -m bench.measure.aten_flaggems``), and record the outcome; after a case that breaks the device for its
process, a new process continues. FlagGems tries dozens of configurations of a kernel; here the measuring process tries
three: first, middle and last.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

CONFIGURATIONS = 3
_TUNING_MS = 2.0  # of one configuration

Case = tuple[str, tuple[int, ...], str]  # overload, shape, dtype


def is_representative(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True for the two sizes of each group of shapes that FlagGems is measured on."""
    return dtype == torch.bfloat16 and shape in ((64, 64), (4096, 4096), (16, 16, 128), (20, 6, 65536), (512, 2048))


@cache
def library() -> Any:
    """Import FlagGems, with few configurations to try."""
    os.environ.setdefault("GEMS_VENDOR", "nvidia")  # otherwise it runs the tools of every vendor it knows
    import triton

    pruned = triton.runtime.Autotuner.prune_configs

    def sampled(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        found = pruned(self, kwargs)
        if len(found) <= CONFIGURATIONS:
            return found
        return [found[i * (len(found) - 1) // (CONFIGURATIONS - 1)] for i in range(CONFIGURATIONS)]

    triton.runtime.Autotuner.prune_configs = sampled
    triton.testing.do_bench = _short_bench
    import flag_gems

    return flag_gems


def _short_bench(call: Callable[[], Any], warmup: int = 0, rep: int = 0, quantiles: Any = None, **_: Any) -> Any:
    """Stand in for Triton's ``do_bench``: the same result, of fewer calls."""
    call()
    torch.cuda.synchronize()
    samples = []
    begun = time.perf_counter()
    while len(samples) < 3 or (len(samples) < 10 and (time.perf_counter() - begun) * 1e3 < _TUNING_MS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    middle = sorted(samples)[len(samples) // 2]
    return [middle] * len(quantiles) if quantiles else middle


@cache
def overloads() -> dict[str, str]:
    """Return the overloads that FlagGems registers, with the names of its functions."""
    return {entry[0]: entry[1].__name__ for entry in library()._FULL_CONFIG}


@contextlib.contextmanager
def in_use(overload: str) -> Iterator[None]:
    """Route this overload to FlagGems."""
    with library().use_gems(include=[overloads()[overload]]):
        yield


def compile_cases(cases: Sequence[Case], *, seconds: float, processes: int = 12) -> dict[Case, str]:
    """Call each case once, in processes that share Triton's cache.

    Return errors, empty for cases that worked. Those that FlagGems lacks, or that were not reached within the time, are
    left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i in range(processes):
            portion = Path(folder) / f"{i}.json"
            portion.write_text(json.dumps(cases[i::processes]), encoding="utf-8")
            environment = {**os.environ, "FLAGGEMS_DB_URL": f"sqlite:///{folder}/{i}.db"}
            command = [sys.executable, "-m", "bench.measure.aten_flaggems", str(portion), "0"]
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        begun, found = time.perf_counter(), {}
        for process in started:
            try:
                process.wait(max(0.1, seconds - (time.perf_counter() - begun)))
            except subprocess.TimeoutExpired:
                process.kill()
            for line in process.communicate()[0].decode().splitlines():
                with contextlib.suppress(TypeError, ValueError):  # it prints more than that
                    name, shape, dtype, error = json.loads(line)
                    found[name, tuple(shape), dtype] = error
        return found


def _call_each(portion: str, first: int) -> None:
    """Call FlagGems for each case of a file from `first` on, and print each with its error."""
    from bench.measure import aten

    library()
    for at, (name, shape, dtype) in enumerate(json.loads(Path(portion).read_text(encoding="utf-8"))):
        if at < first or name not in overloads():
            continue
        row = aten.table.row_of(name)
        try:
            given = aten.arguments(row, tuple(shape), getattr(torch, dtype), "cuda")
            if given is None:
                continue
            with torch.no_grad(), in_use(name):
                aten.operator_of(row)(*given[0], **given[1])
            torch.cuda.synchronize()
        except Exception as error:
            print(json.dumps([name, shape, dtype, f"{type(error).__name__}: {error}"[:200]]), flush=True)
            if "CUDA error" in str(error):  # every later call here would fail
                os.execv(sys.executable, [sys.executable, "-m", "bench.measure.aten_flaggems", portion, str(at + 1)])
            continue
        print(json.dumps([name, shape, dtype, ""]), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    _call_each(sys.argv[1], int(sys.argv[2]))
