"""Every op under compute-sanitizer, compared with the table of known reports in tests/support/sanitizer.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import sanitizer

from rtkernels.errors import KernelCompileError
from rtkernels.runtime.operator import registry

OPS = [op.name for op in registry.ops()]

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void rtk::layer_norm_bwd_bulk<rtk::bf16>(T1*)+0x1a0
=========     and Read access at void rtk::layer_norm_bwd_bulk<rtk::bf16>(T1*)+0x240 [32 hazards]
=========
========= Error: Potential WAR hazard detected at __shared__ 0x2280 in block (1,0,0) :
=========     Read Thread (176,0,0) at _ZN3rtk12softmax_fwd_INS_4bf16EEEvv+0x10
=========     Write Thread (352,0,0) at _ZN3rtk12softmax_fwd_INS_4bf16EEEvv+0x20
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
3 passed
"""
MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void rtk::rms_norm_fwd<float>(const T1 *)+0x90
=========     by thread (31,0,0) in block (0,0,0)
=========     Address 0x7f is out of bounds
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""


def test_reports_are_read() -> None:
    first, second = sanitizer.reports(RACE)
    assert (first.kind, first.kernel) == ("RAW", "layer_norm_bwd_bulk")
    assert (second.kind, second.kernel) == ("WAR", "softmax_fwd_")
    (only,) = sanitizer.reports(MEMORY)
    assert (only.kind, only.kernel) == ("out of bounds", "rms_norm_fwd")
    assert sanitizer.reports("========= COMPUTE-SANITIZER\n1 passed\n========= ERROR SUMMARY: 0 errors\n") == []


def test_samples_in_several_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that dies is replaced, and its output belongs to the op that it was running."""
    script = tmp_path / "worker.py"
    script.write_text(
        f"""import pathlib, sys
claims, *names = sys.argv[2:]
for name in names:
    try:
        (pathlib.Path(claims) / name).touch(exist_ok=False)
    except FileExistsError:
        continue
    print({sanitizer.BEGIN!r} + name, flush=True)
    if name == "second":
        sys.exit(1)
    print({MEMORY!r} if name == "third" else "")
    print({sanitizer.END!r} + "passed", flush=True)
"""
    )
    monkeypatch.setattr(sanitizer, "command", lambda tool, *given: [sys.executable, str(script), *given])
    found = sanitizer.check_samples(["first", "second", "third"], timeout=60, processes=1)
    for tool in sanitizer.TOOLS:
        ends = [found[tool, name].end.startswith(f"{sanitizer.END}passed") for name in ("first", "second", "third")]
        assert ends == [True, False, True]
        assert [r.kernel for r in found[tool, "third"].found] == ["rms_norm_fwd"] and not found[tool, "first"].found


def test_only_errors_that_torch_raises_by_itself_are_its_own() -> None:
    def refuse() -> None:
        raise NotImplementedError('"histc" not implemented for BFloat16')

    assert sanitizer.is_torchs_own(NotImplementedError('"histc" not implemented for BFloat16'), refuse)
    assert not sanitizer.is_torchs_own(NotImplementedError("of a handler"), refuse)
    assert not sanitizer.is_torchs_own(RuntimeError('"histc" not implemented for BFloat16'), lambda: None)
    for error in (KernelCompileError("no such variant"), RuntimeError("CUDA error: an illegal memory access")):
        assert not sanitizer.is_torchs_own(error, refuse)


def test_files_of_an_op() -> None:
    names = {op: [path.rsplit("/")[-1] for path in sanitizer.files(op, OPS)] for op in ("glu", "glu_fp8", "rms_norm")}
    assert names["glu"] == ["test_glu.py", "test_glu_calls.py", "test_glu_smooth_fp8.py"]
    assert names["rms_norm"] == ["test_rms_norm.py"]
    assert {"test_glu_fp8.py", "test_glu_fp8_stream.py"} <= set(names["glu_fp8"])


def test_only_what_is_in_the_table_is_known() -> None:
    assert [r.kernel for r in sanitizer.unknown("racecheck", sanitizer.reports(RACE))] == ["softmax_fwd_"]
    assert len(sanitizer.unknown("memcheck", sanitizer.reports(RACE))) == 2
    kernels = {kernel.name for op in registry.ops() for kernel in op.kernels}
    for (tool, kernel), (kinds, reason) in sanitizer.KNOWN.items():
        assert tool in sanitizer.TOOLS and kernel in kernels and kinds and reason


@pytest.mark.gpu
@pytest.mark.slow
def test_samples_of_every_op_in_short() -> None:
    """All ops, within the time limit of a single one below."""
    if sanitizer.sanitizer() is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    found = sanitizer.check_samples(sanitizer.sampled(), timeout=600, processes=7)
    unknown = [r for (tool, _), samples in found.items() for r in sanitizer.unknown(tool, samples.found)]
    assert not unknown, "\n\n".join(r.text for r in unknown[:5])
    undone = {key: s.end for key, s in found.items() if not s.end.startswith(f"{sanitizer.END}passed")}
    assert not undone


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", sanitizer.TOOLS)
@pytest.mark.parametrize("op", OPS)
def test_nothing_but_known_reports(op: str, tool: str) -> None:
    if sanitizer.sanitizer() is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    found, end = sanitizer.check(tool, op, timeout=600)
    unknown = sanitizer.unknown(tool, found)
    assert not unknown, "\n\n".join(r.text for r in unknown[:5])
    assert end.startswith(f"{sanitizer.END}passed"), end
