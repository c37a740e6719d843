"""Kernels under compute-sanitizer: what is run, how its reports are read, and the table of those that are known.

``python tests/support/sanitizer.py OP`` runs the sample inputs of an op and the cases of its tests on the GPU; under
the sanitizer that is what :func:`check` starts. tests/contracts/test_sanitizer.py compares reports with `KNOWN`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
END = "end of tests: "

# What compute-sanitizer reports though it is in order: tool, kernel -> kinds of report, and why. All others are errors.
_BY_BARRIER = (
    "Sums of the groups of threads go to shared memory, then comes __syncthreads, then all threads add them up: writer "
    "and reader are on its two sides. The emulator, which orders accesses by that barrier, reports nothing."
)
_BY_ONE_LANE = (
    "All lanes of a warp write, __syncwarp follows, and one lane arrives at a barrier for them, which orders what "
    "others do after they waited for it; with all lanes arriving nothing is reported (docs/racecheck.md)."
)
KNOWN: dict[tuple[str, str], tuple[set[str], str]] = {
    ("racecheck", "layer_norm_bwd_bulk"): ({"RAW"}, _BY_BARRIER),
    ("racecheck", "rms_norm_bwd_bulk"): ({"RAW"}, _BY_BARRIER),
    ("racecheck", "glu_fp8_fwd_stream"): ({"RAW"}, _BY_ONE_LANE),
    ("racecheck", "norm_fp8_ring"): ({"RAW"}, _BY_ONE_LANE),
    ("racecheck", "qk_norm_rope_bwd_bulk"): ({"RAW"}, _BY_ONE_LANE),
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


def command(tool: str, op: str) -> list[str]:
    """Return the command that runs an op under a tool. Of all kernels ours alone are looked at."""
    more = ["--racecheck-report", "all"] if tool == "racecheck" else []
    limits = ["--kernel-regex", "kns=rtk", "--print-limit", "200"]
    script = str(TESTS / "support" / "sanitizer.py")
    return [str(sanitizer()), "--tool", tool, *more, *limits, sys.executable, script, op]


def check(tool: str, op: str, timeout: float) -> tuple[list[Report], str]:
    """Run an op under a tool; return what was reported, and the last line of `main`, or why there is none."""
    # Without torch's cache of memory, so that what is behind a tensor is nobody's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command(tool, op), capture_output=True, text=True, cwd=TESTS.parent, env=environment, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        return reports(output), f"not done after {timeout:.0f} s"
    ends = [line for line in run.stdout.splitlines() if line.startswith(END)]
    return reports(run.stdout), ends[-1] if ends else f"exit code {run.returncode}: {(run.stdout + run.stderr)[-300:]}"


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

    for torch_op, args in samples_of(op, "cuda"):
        torch_op(*args)
    torch.cuda.synchronize()
    selected = "not (graph or compile or streams or threads or no_worse)"
    names = [o.name for o in registry.ops()]
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore"]
    status = pytest.main([*files(op, names), *quiet, "-m", "gpu and not slow", "-k", selected])
    torch.cuda.synchronize()
    ended = {pytest.ExitCode.OK: "passed", pytest.ExitCode.NO_TESTS_COLLECTED: "passed (samples alone)"}
    kernels = [k for k in registry.get(op).kernels if k.variants(device_info(0).target)]
    missed = [k.name for k in kernels if not k._functions]
    print(f"{END}{ended.get(status, 'failed')}; {len(kernels)} kernels, not reached: {', '.join(missed) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    sys.exit(main(sys.argv[1]))
