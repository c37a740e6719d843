"""The emulator itself under AddressSanitizer and UBSan: its runtime, fibers included, and a kernel of every family."""

from __future__ import annotations

import pytest
from support.emulator_harness import needs_compiler
from support.sanitized import CALLS, PLANTED, libraries, run_cases

from rtkernels import emulator
from rtkernels.runtime.build import sources

SAMPLE = ("norm",)  # of the families, in a run of the whole suite

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        emulator.unavailable() is None and libraries() is None, reason="the host compiler has no library of sanitizers"
    ),
]


def _families() -> set[str]:
    return {file.parent.name for file in sources.root().glob("*/*.cu")}


def test_every_family_has_a_call() -> None:
    assert set(CALLS) == _families()


def _check(cases: list[str]) -> None:
    found = run_cases(cases)
    for case in cases:
        said = found[case]["output"]
        wanted = PLANTED[case][1] if case in PLANTED else ""
        assert (found[case]["code"] != 0) == bool(wanted) and wanted in said, f"{case}: {said}"
        if case in CALLS:
            assert any(line.startswith(f"{case}/") for line in found[case]["launched"]), f"{case}: {said}"


@pytest.mark.one_in(1000)
def test_planted_overflows_are_found_and_correct_kernels_pass() -> None:
    _check([*PLANTED, *SAMPLE])


@pytest.mark.slow
def test_a_kernel_of_every_family_passes() -> None:
    _check(sorted(CALLS))
