"""FlagGems in ``python -m bench aten``: which overloads it has, and its Triton kernels compiled before they are timed.

Compiling takes seconds of a case, timing milliseconds. So processes that share Triton's cache call each case one time
first (``python -m bench.measure.aten_flaggems``), and note which ones worked. FlagGems tries up to some dozens of
configurations of a kernel: here three of them, first, middle and last, by the process that measures.
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
    os.environ.setdefault("GEMS_VENDOR", "nvidia")  # else it runs the tools of every vendor it knows
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
    """Let FlagGems do this overload."""
    with library().use_gems(include=[overloads()[overload]]):
        yield


def compile_cases(cases: Sequence[Case], *, seconds: float, processes: int = 12) -> set[Case]:
    """Call each case one time, in processes that share Triton's cache; return those that worked within the time."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i in range(processes):
            portion = Path(folder) / f"{i}.json"
            portion.write_text(json.dumps(cases[i::processes]), encoding="utf-8")
            environment = {**os.environ, "FLAGGEMS_DB_URL": f"sqlite:///{folder}/{i}.db"}
            command = [sys.executable, "-m", "bench.measure.aten_flaggems", str(portion)]
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        begun, found = time.perf_counter(), set()
        for process in started:
            try:
                process.wait(max(0.1, seconds - (time.perf_counter() - begun)))
            except subprocess.TimeoutExpired:
                process.kill()
            for line in process.communicate()[0].decode().splitlines():
                with contextlib.suppress(TypeError, ValueError):  # it prints more than that
                    name, shape, dtype = json.loads(line)
                    found.add((name, tuple(shape), dtype))
        return found


def _call_each(cases: list[Any]) -> None:
    """Call FlagGems for each case, and print those that worked."""
    from bench.measure import aten
    from rtkernels.aten import table

    library()
    for name, shape, dtype in cases:
        row = table.table()[name]
        base, _, overload = name.partition(".")
        try:
            given = aten.arguments(row, tuple(shape), getattr(torch, dtype), "cuda")
            if given is None or name not in overloads():
                continue
            with torch.no_grad(), in_use(name):
                getattr(getattr(torch.ops.aten, base), overload or "default")(*given[0], **given[1])
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}: {type(error).__name__}", flush=True)
            continue
        print(json.dumps([name, shape, dtype]), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    _call_each(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
