"""Kernels under compute-sanitizer: what is run, how its reports are read, and the table of those that are known.

``python tests/support/sanitizer.py OP`` runs the sample inputs of an op and the cases of its tests on the GPU; under
the sanitizer that is what :func:`check` starts. ``python tests/support/sanitizer.py --samples FOLDER OP...`` runs the
sample inputs alone, of every op that no other process has claimed in that folder: :func:`check_samples` starts several
of them, so that all ops are done in minutes. tests/contracts/test_sanitizer.py compares reports with `KNOWN`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
BEGIN, END = "begin of samples: ", "end of tests: "
ATEN = "aten:"  # before a family of torch's operators, in the place of an op

# False reports of compute-sanitizer: tool, kernel -> kinds of report, and why. All others are errors.
_BY_BARRIER = (
    "Sums of the groups of threads go to shared memory, then comes __syncthreads, then all threads add them up: writer "
    "and reader are on its two sides. The emulator, which orders accesses by that barrier, reports nothing."
)
_BY_ONE_LANE = (
    "All lanes of a warp write (or read), __syncwarp follows, and one lane arrives at a barrier for them, which orders "
    "what others do after they waited for it; with all lanes arriving nothing is reported (docs/racecheck.md)."
)
_BY_ARRIVAL = (
    "Warps write to shared memory and arrive at a named barrier (bar.arrive) at which the readers wait (bar.sync): "
    "by the PTX manual the readers see what was written. With bar.sync on both sides nothing is reported "
    "(docs/racecheck.md)."
)
_BY_CLUSTER = (
    "Each thread waits for its own cp.async, then comes the barrier of the cluster, then other blocks write to that "
    "shared memory. The emulator, which orders accesses by that barrier, reports nothing (docs/racecheck.md)."
)
KNOWN: dict[tuple[str, str], tuple[set[str], str]] = {
    ("racecheck", "chunk_attention"): ({"WAW"}, _BY_CLUSTER),
    ("racecheck", "gated_delta_rule_reverse"): ({"RAW"}, _BY_BARRIER),
    ("racecheck", "layer_norm_bwd_bulk"): ({"RAW"}, _BY_BARRIER),
    ("racecheck", "rms_norm_bwd_bulk"): ({"RAW"}, _BY_BARRIER),
    ("racecheck", "glu_fp8_fwd_stream"): ({"RAW"}, _BY_ONE_LANE),
    ("racecheck", "norm_fp8_ring"): ({"RAW"}, _BY_ONE_LANE),
    ("racecheck", "qk_norm_rope_bwd_bulk"): ({"RAW"}, _BY_ONE_LANE),
    ("racecheck", "attention_sm90_bwd_pass"): ({"RAW", "WAR"}, _BY_ONE_LANE),
    ("racecheck", "mla_decode_sm90"): ({"RAW"}, _BY_ARRIVAL),
}

_START = re.compile(r"^=+ (?:Error|Warning|ERROR|WARNING|Invalid|Potential|Race|Program hit|Uninit|Barrier)")
_KINDS = (("RAW", "RAW hazard"), ("WAR", "WAR hazard"), ("WAW", "WAW hazard"), ("out of bounds", "Invalid __"))
_RACE = re.compile(r"Race reported between (\w+) access.*?and (\w+) access", re.DOTALL)
_MANGLED = re.compile(r"_ZN3rtk(\d+)(\w+)")
_PLAIN = re.compile(r"\brtk::(\w+)<")


@dataclass(frozen=True)
class Report:
    """One report: of what kind (RAW, WAR, WAW, out of bounds, else its first line), in which kernel, and its text."""

    kind: str
    kernel: str
    text: str


def sanitizer() -> str | None:
    """Return where compute-sanitizer is, or None."""
    return shutil.which("compute-sanitizer") or next(
        (str(p) for p in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), reverse=True)), None
    )


def files(op: str, ops: list[str]) -> list[str]:
    """Return the test files of one of several ops: test_<op>.py, and test_<op>_*.py if not those of another one."""
    found = [p for pattern in (f"test_{op}.py", f"test_{op}_*.py") for p in TESTS.glob(f"ops/*/{pattern}")]
    longer = [other for other in ops if other.startswith(f"{op}_")]
    return sorted(str(p) for p in found if not any(p.stem.startswith(f"test_{other}") for other in longer))


def command(tool: str, *arguments: str) -> list[str]:
    """Return the command that runs this script under a tool, restricted to our kernels."""
    more = ["--racecheck-report", "all"] if tool == "racecheck" else []
    limits = ["--kernel-regex", "kns=rtk", "--print-limit", "200"]
    script = str(TESTS / "support" / "sanitizer.py")
    return [str(sanitizer()), "--tool", tool, *more, *limits, sys.executable, script, *arguments]


def _environment() -> dict[str, str]:
    """Without torch's caching allocator, so that memory past a tensor is unallocated."""
    return {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}


def check(tool: str, op: str, timeout: float) -> tuple[list[Report], str]:
    """Run an op under a tool; return what was reported, and the last line of `main`, or why there is none."""
    try:
        run = subprocess.run(
            command(tool, op), capture_output=True, text=True, cwd=TESTS.parent, env=_environment(), timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        return reports(output), f"not done after {timeout:.0f} s"
    ends = [line for line in run.stdout.splitlines() if line.startswith(END)]
    return reports(run.stdout), ends[-1] if ends else f"exit code {run.returncode}: {(run.stdout + run.stderr)[-300:]}"


@dataclass
class Samples:
    """The result of an op's sample inputs under a tool: how it ended, and reports."""

    end: str = "not begun"
    found: list[Report] = field(default_factory=list)


def sampled() -> list[str]:
    """Return the ops that have sample inputs, and the families of torch's operators."""
    from rtkernels.aten import table
    from rtkernels.runtime.operator import registry

    ops = [op.name for op in registry.ops() if op.torch_ops]
    return [*(f"{ATEN}{family}" for family in sorted({row.family for row in table.table().values()})), *ops]


def check_samples(names: list[str], timeout: float, processes: int) -> dict[tuple[str, str], Samples]:
    """Run sample inputs under all tools, in so many processes for each; return what (tool, name) gave.

    A process takes the next unclaimed name; if it dies, another one replaces it.
    """
    end = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        outputs: dict[str, list[Path]] = {tool: [] for tool in TOOLS}
        active: dict[str, list[subprocess.Popen[bytes]]] = {tool: [] for tool in TOOLS}
        for tool in TOOLS:
            (Path(folder) / tool).mkdir()
        while time.monotonic() < end:
            for tool in TOOLS:
                claims = Path(folder) / tool
                active[tool] = [process for process in active[tool] if process.poll() is None]
                missing = len(names) - len(list(claims.iterdir()))
                for _ in range(min(missing, processes - len(active[tool]))):
                    outputs[tool].append(Path(folder) / f"{tool}.{len(outputs[tool])}.txt")
                    with outputs[tool][-1].open("wb") as file:
                        arguments = command(tool, "--samples", str(claims), *names)
                        options = {"cwd": TESTS.parent, "env": _environment(), "start_new_session": True}
                        active[tool].append(
                            subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, **options)
                        )
            if not any(active.values()):
                break
            time.sleep(0.5)
        for process in (p for listed in active.values() for p in listed):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = {(tool, name): Samples() for tool in TOOLS for name in names}
        for tool, listed in outputs.items():
            for path in listed:
                for part in path.read_text(errors="replace").split(BEGIN)[1:]:
                    name, _, text = part.partition("\n")
                    ends = [line for line in text.splitlines() if line.startswith(END)]
                    found[tool, name] = Samples(ends[-1] if ends else f"not done: {text[-300:]}", reports(text))
        return found


def reports(output: str) -> list[Report]:
    """Return the reports in the output of compute-sanitizer."""
    found, block = [], []
    for line in [*output.splitlines(), "========= Error: end"]:
        if _START.match(line):
            if block:
                found.append(_report("\n".join(block)))
            block = [line]
        elif block and line.startswith("========="):
            block.append(line)
    return [report for report in found if report.kernel or report.kind == "out of bounds"]


def unknown(tool: str, found: list[Report]) -> list[Report]:
    """Return the reports that are not in the table."""
    return [r for r in found if r.kind not in KNOWN.get((tool, r.kernel), (set(), ""))[0]]


def _report(text: str) -> Report:
    kernel = ""
    if plain := _PLAIN.search(text):
        kernel = plain[1]
    elif mangled := _MANGLED.search(text):
        kernel = mangled[2][: int(mangled[1])]
    if race := _RACE.search(text):
        kind = f"{race[2][0]}A{race[1][0]}"  # read after write is a write, and a read that followed
        kind = "WAW" if kind == "WAW" else "RAW" if race[1] == "Write" else "WAR"
    else:
        kind = next((kind for kind, words in _KINDS if words in text), text.splitlines()[0].strip("= "))
    return Report(kind, kernel, text)


def main(op: str) -> int:
    """Run the samples of an op and the cases of its test files on the GPU; print how that ended."""
    import pytest
    import torch
    from contracts.samples import samples_of

    from rtkernels.runtime.launch.device import device_info
    from rtkernels.runtime.operator import registry
    from support.ops import op_named

    for torch_op, args in samples_of(op, "cuda"):
        torch_op(*args)
    torch.cuda.synchronize()
    selected = "not (graph or compile or streams or threads or no_worse)"
    names = [o.name for o in registry.ops()]
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore"]
    status = pytest.main([*files(op, names), *quiet, "-m", "gpu and not slow", "-k", selected])
    torch.cuda.synchronize()
    ended = {pytest.ExitCode.OK: "passed", pytest.ExitCode.NO_TESTS_COLLECTED: "passed (samples alone)"}
    kernels = [k for k in op_named(op).kernels if k.variants(device_info(0).target)]
    missed = [k.name for k in kernels if not k._functions]
    print(f"{END}{ended.get(status, 'failed')}; {len(kernels)} kernels, not reached: {', '.join(missed) or 'none'}")
    return 0


def _run_samples(name: str) -> None:
    """Run the sample inputs of an op, or one case of each of torch's operators of a family."""
    import torch
    from contracts.samples import samples_of

    import rtkernels
    from bench.measure import aten

    if not name.startswith(ATEN):
        for torch_op, args in samples_of(name, "cuda"):
            torch_op(*args)
        return
    for row in aten.table.table().values():
        given = aten.arguments(row, (33, 130), torch.bfloat16, "cuda") if row.family == name[len(ATEN) :] else None
        if given is None:
            continue
        base, _, overload = row.name.partition(".")
        operator, (args, options) = getattr(getattr(torch.ops.aten, base), overload or "default"), given
        with torch.no_grad():
            try:
                with rtkernels.use(row.name):
                    operator(*args, **options)
            except RuntimeError as error:  # NotImplementedError is one
                if not is_torchs_own(error, lambda: operator(*args, **options)):  # noqa: B023
                    raise
                print(f"{row.name}: {error}"[:200], flush=True)


def is_torchs_own(error: Exception, plain_call: Callable[[], Any]) -> bool:
    """Return True for what torch says of arguments that it has no kernel for, as an operator that lacks bf16.

    Calls that ours leave to torch end like that. ``plain_call`` is the same without ours: torch's own operator raises
    the same error there. Errors of ours, and those of the device, which every later call repeats, are not its own.
    """
    from rtkernels.errors import RtkError

    if isinstance(error, RtkError) or "CUDA error" in str(error):
        return False
    try:
        plain_call()
    except type(error) as own:
        return str(own) == str(error)
    return False


def main_samples(claims: Path, names: list[str]) -> int:
    """Run the samples of every name that no other process has claimed; print how each ended."""
    import torch

    for name in names:
        try:
            (claims / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        print(f"{BEGIN}{name}", flush=True)
        try:
            _run_samples(name)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{END}failed: {type(error).__name__}: {error}"[:400].replace("\n", " "), flush=True)
            if "CUDA" in str(error):  # the GPU is unusable for this process
                return 1
            continue
        print(f"{END}passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    if sys.argv[1] == "--samples":
        sys.exit(main_samples(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1]))
