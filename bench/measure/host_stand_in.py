"""``python -m bench host --stand-in``: host time per call without a GPU, and its ratio between two trees.

    python -m bench host --stand-in --tree ../before --tree .

A process per tree has the stand-in CUDA device of ``tests/support/stand_in``, whose launches are counted and compute
nothing. Rows are the host rows, and beside them every public function with ``out=``, with gradients and with its
backward, where it has these, and every aten override (``aten NAME``). A time is the thread's CPU time in the quickest
of many short batches; the ratio of two trees is the median over batches that were measured right after each other, on
one core, so that what else the machine does hardly shows. The number of bytecode instructions that Python executes in a
call is counted as well: it is the same in every run, however busy the machine.

The absolute times are not those of a machine with a GPU: allocations, launches and torch's own operators cost another
time here. Compare trees, not devices.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.meta import ROOT

BATCH_NS = 300_000  # shorter than a time slice: most batches are not interrupted
MAX_BATCH = 200
SECONDS = 40.0  # of measuring, per tree
TOGETHER = 10  # rows that are measured in one tree before the other one has its turn
ATEN_SHAPE = (64, 64)

Case = Callable[[], Any]


# ---- rows -----------------------------------------------------------------------------------------------------------


class _Captured(Exception):
    """Ends a call whose arguments are wanted, not its result."""


class _Capturing:
    """In the place of the package: keeps the function and the arguments of the next public call."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.active, self.call = False, None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._package, name)
        if not inspect.isfunction(found):
            return found

        @functools.wraps(found)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return found(*args, **kwargs)
            self.call = found, args, kwargs
            raise _Captured

        return function


def _public_calls() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yield name, function and arguments of every host row of a public function."""
    import rtkernels
    from bench.measure.host_calls import calls

    package = _Capturing(rtkernels)
    for name, (_, make) in calls(package, "cuda").items():
        case = make()
        package.active = True
        try:
            case()
        except _Captured:
            yield name, *package.call
        except Exception:  # a call of ``bench/rows``, which are not captured; the stand-in device lacks an operator
            pass
        finally:
            package.active = False


def _with_out(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case | None:
    if "out" not in inspect.signature(function).parameters or "out" in kwargs:
        return None
    return functools.partial(function, *args, **kwargs, out=function(*args, **kwargs))


def _with_gradients(
    function: Callable[..., Any], args: Any, kwargs: Any, most: int = sys.maxsize
) -> tuple[Case, Case] | None:
    """Return the call on leaves that want gradients, and the same with its backward; None if it has none.

    Leaves are all its tensors of these dtypes, or the first one where others have no gradient.
    """
    import torch
    from torch.utils import _pytree

    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float32)
        if not floating or len(leaves) >= most:
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    given = args, kwargs
    args, kwargs = _pytree.tree_map(leaf, given)
    call = functools.partial(function, *args, **kwargs)
    try:
        call()
    except ValueError:  # an ArgumentError of this tree or another one
        return None if most == 1 else _with_gradients(function, *given, 1)
    results = [t for t in _pytree.tree_leaves(call()) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not results:
        return None
    gradients = [torch.ones_like(t) for t in results]

    def backward() -> Any:
        made = [t for t in _pytree.tree_leaves(call()) if isinstance(t, torch.Tensor) and t.requires_grad]
        return torch.autograd.grad(made, leaves, gradients, allow_unused=True)

    backward()
    return call, backward


def _aten() -> Iterator[tuple[str, Case]]:
    """Enable all overrides and yield a small call of each."""
    import torch

    import rtkernels
    from bench.measure.aten import arguments
    from rtkernels.aten import table

    for name in table.MIN_ELEMENTS:  # small tensors have the same host time
        table.MIN_ELEMENTS[name] = 0
    rows = table.table()
    rtkernels.enable("all")
    for name, row in rows.items():
        base, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, base), overload or "default")
        if torch.Tag.dynamic_output_shape in function.tags:  # no kernel writes the size that the host reads
            continue
        made = arguments(row, ATEN_SHAPE, torch.float32, "cuda")
        if made is not None:
            yield f"aten {name}", functools.partial(function, *made[0], **made[1])


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def rows(wanted: str) -> tuple[dict[str, Case], dict[str, str]]:
    """Return the rows whose names match, and why others that match cannot be called."""
    import torch

    from bench.measure import host

    found: dict[str, Case] = {}
    failed: dict[str, str] = {}

    def add(name: str, make: Callable[[], Case | None]) -> None:
        if not re.search(wanted, name):
            return
        try:
            case = make()
            if case is not None:
                with torch.inference_mode(name.endswith(" inference")):
                    case()
                found[name] = case
        except Exception as error:
            failed[name] = _told(error)

    for name, case in host.cases().items():
        if isinstance(case, str):
            failed[name] = case
        else:
            add(name, lambda case=case: case)
    for name, *call in _public_calls():
        add(f"{name} out", lambda call=call: _with_out(*call))
        if f"{name} grad" not in found:
            both = functools.cache(lambda call=call: _with_gradients(*call) or (None, None))
            add(f"{name} grad", lambda both=both: both()[0])
            add(f"{name} grad_backward", lambda both=both: both()[1])
    if re.search(wanted, "aten") or wanted.startswith("aten"):
        for name, case in _aten():
            add(name, lambda case=case: case)
    return found, failed


# ---- time -----------------------------------------------------------------------------------------------------------


def _batch(case: Case, count: int) -> float:
    start = time.thread_time_ns()
    for _ in range(count):
        case()
    return (time.thread_time_ns() - start) / count


class Rows:
    """Rows that can be measured again and again; those that raise go to `failed`."""

    def __init__(self, found: dict[str, Case], failed: dict[str, str]) -> None:
        import torch

        torch.autograd.set_multithreading_enabled(False)  # a backward in its own thread is scheduling, not our time
        self.found, self.failed = found, failed
        self._counts = dict.fromkeys(found, 5)
        self.measure([*found])  # calls are recorded, and replayed from the third one on
        for name, taken in self.measure([*found]).items():
            self._counts[name] = max(2, min(MAX_BATCH, int(BATCH_NS / taken)))

    def measure(self, names: list[str]) -> dict[str, float]:
        """Return ns of CPU time per call in one batch of each row."""
        import torch

        result: dict[str, float] = {}
        gc.disable()
        for name in names:
            if name not in self.found:
                continue
            try:
                with torch.inference_mode(name.endswith(" inference")):
                    result[name] = max(_batch(self.found[name], self._counts[name]), 1.0)
            except Exception as error:  # of torch, which looks at values
                del self.found[name]
                self.failed[name] = _told(error)
        gc.enable()
        return result


def opcodes(found: dict[str, Case]) -> dict[str, int]:
    """Return how many bytecode instructions a call executes."""
    import torch

    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    result: dict[str, int] = {}
    for name, case in found.items():
        with torch.inference_mode(name.endswith(" inference")):
            case()
            count = 0
            sys.settrace(trace)
            try:
                case()
            finally:
                sys.settrace(None)
        result[name] = count
    return result


def child(tree: Path, wanted: str, arch: str) -> None:
    """Measure one tree, in a process that has imported nothing of rtkernels.

    It prints a line of JSON about its rows, and for every line of names that it reads one with a batch of each.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(tree)]
    from support import stand_in

    device = stand_in.install("count", arch)
    import rtkernels

    if tree not in Path(rtkernels.__file__).resolve().parents:
        raise SystemExit(f"rtkernels comes from {rtkernels.__file__}, not from {tree}")
    warnings.simplefilter("ignore")
    device.skip_known_calls()
    measured = Rows(*rows(wanted))
    gc.collect()
    gc.freeze()  # what is there stays: collections look at what batches leave only
    print(json.dumps({"opcodes": opcodes(measured.found), "failed": measured.failed}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measured.measure(json.loads(line))), flush=True)
        gc.collect()


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what ``python -m bench host`` takes."""
    command.add_argument("--stand-in", action="store_true", required=True, help="the only way: no GPU is used")
    command.add_argument(
        "--tree", type=Path, action="append", help="checkout to measure; two of them are compared; default: this one"
    )
    command.add_argument("--rows", default="", help="regular expression on names of rows; 'aten' for overrides")
    command.add_argument(
        "--seconds", type=float, default=SECONDS, help="of measuring per tree, after 10 to 20 of setup"
    )
    command.add_argument("--arch", default="sm_90a", help="sm_80, sm_86, sm_89, sm_90a or sm_120a")
    command.add_argument("--out", type=Path, help="write JSON here as well")


def run(args: argparse.Namespace) -> int:
    """Measure every tree, print JSON, or for two trees a table of ratios, largest first."""
    trees = [path.resolve() for path in args.tree or [ROOT]]
    if missing := [str(tree) for tree in trees if not (tree / "rtkernels").is_dir()]:
        print(f"bench host: no package rtkernels in {', '.join(missing)}", file=sys.stderr)
        return 2
    results = _measured(trees, args)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if len(results) == 2:
        print(_table(*results))
    elif not args.out:
        print(json.dumps(results, indent=1))
    return 0


class _Child:
    """The process of one tree, and what it has measured."""

    def __init__(self, tree: Path, args: argparse.Namespace) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RTKERNELS_EMULATE")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(tree), args.rows, args.arch],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.tree, self.batches = tree, {}
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench host: the process of {self.tree} ended")
        return json.loads(line)

    def measure(self, names: list[str]) -> float:
        """Measure a batch of each row; return the seconds that took."""
        self._process.stdin.write(json.dumps(names) + "\n")
        self._process.stdin.flush()
        start, answer = time.perf_counter(), self._answer()
        for name in names:
            self.batches.setdefault(name, []).append(answer.get(name))
        return time.perf_counter() - start

    def end(self) -> dict[str, Any]:
        """Return what it measured."""
        self._process.stdin.close()
        self._process.wait()
        times = {name: [ns for ns in batches if ns] for name, batches in self.batches.items()}
        best = {name: round(min(batches) / 1e3, 3) for name, batches in times.items() if batches}
        return {"tree": str(self.tree), "us_per_call": best, **self.about, "batches_ns": self.batches}


def _measured(trees: list[Path], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure trees by turns, a few rows at a time, so that both see the machine in the same state."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # cores differ; the processes inherit it
    children = [_Child(tree, args) for tree in trees]
    names = list(dict.fromkeys(name for child in children for name in child.about["opcodes"]))
    spent = 0.0
    while spent < args.seconds * len(children):
        for first in range(0, len(names), TOGETHER):
            spent += sum(child.measure(names[first : first + TOGETHER]) for child in children)
    return [child.end() for child in children]


def _ratio(name: str, old: dict[str, Any], new: dict[str, Any]) -> float:
    """Return the median of new / old over batches that were measured right after each other."""
    pairs = zip(old["batches_ns"][name], new["batches_ns"][name], strict=True)
    return statistics.median(b / a for a, b in pairs if a and b)


def _table(old: dict[str, Any], new: dict[str, Any]) -> str:
    before, after = old["us_per_call"], new["us_per_call"]
    ratios = {name: _ratio(name, old, new) for name in before.keys() & after.keys()}
    lines = [f"{'time':>6} {'opcodes':>7} {'old us':>9} {'new us':>9}  row (ratios: new / old)"]
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        codes = new["opcodes"][name] / max(old["opcodes"][name], 1)
        lines.append(f"{ratio:6.3f} {codes:7.3f} {before[name]:9.2f} {after[name]:9.2f}  {name}")
    for name in sorted(before.keys() ^ after.keys()):
        which, other = ("old", new) if name in before else ("new", old)
        lines.append(f"only in the {which} tree: {name} ({other['failed'].get(name, 'no such row')})")
    slower = sum(ratio > 1.05 for ratio in ratios.values())
    lines.append(f"{len(ratios)} rows, {slower} of them more than 5 % slower")
    return "\n".join(lines)


if __name__ == "__main__":
    child(Path(sys.argv[1]), *sys.argv[2:])
