"""Every planted bug is caught, and what catches it finds nothing wrong with the sources as they are."""

from __future__ import annotations

from functools import cache

import pytest
from support.emulator_harness import needs_compiler
from support.source_tree import source_tree

from planted import checks, checks_routing  # noqa: F401  (they fill CHECKS)
from planted.bugs import BUGS, Bug
from planted.judge import CHECKS
from planted.ordering import ORDERING
from rtkernels.emulator import EmulatorError
from rtkernels.errors import ToolkitError
from rtkernels.runtime.build import nvrtc, sources

ALL = [*BUGS, *ORDERING]
pytestmark = needs_compiler


def planted(bug: Bug) -> str:
    """Return the text of the file with the bug in it."""
    text = sources.read(bug.file).decode()
    found = text.count(bug.old)
    if found <= (bug.nth or 0) or (bug.nth is None and found > 1):
        wanted = "once" if bug.nth is None else f"at least {bug.nth + 1} times"
        pytest.fail(
            f"this planting no longer applies: {bug.file} has {bug.old!r} {found} times, expected {wanted}; "
            f"change {bug.name!r} in tests/emulator/planted so that it plants the same bug in what is there now"
        )
    parts = text.split(bug.old)
    at = (bug.nth or 0) + 1
    return bug.old.join(parts[:at]) + bug.new + bug.old.join(parts[at:])


@cache
def _passes(check: str) -> None:
    """Run a check on the sources as they are; once for all bugs that it catches."""
    CHECKS[check]()


def _case(bug: Bug):
    return pytest.param(bug, id=bug.name.replace(" ", "_"), marks=() if bug.fast else pytest.mark.slow)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bug", [_case(bug) for bug in ALL])
def test_planted_bug_is_caught(bug: Bug) -> None:
    if bug.check == "instructions":
        try:
            nvrtc.version()
        except ToolkitError as error:
            pytest.skip(str(error))
    edited = planted(bug)
    _passes(bug.check)
    with source_tree({bug.file: edited}):
        try:
            CHECKS[bug.check]()
        except EmulatorError as error:
            assert bug.kind in ("", error.kind), f"caught as {error.kind}, expected {bug.kind}: {error}"
        except AssertionError as error:
            assert not bug.kind, f"caught by its results, expected the report {bug.kind}: {error}"
        else:
            pytest.fail(f"{bug.check} does not notice it")


def test_every_planting_applies() -> None:
    for bug in ALL:
        planted(bug)


def test_plantings_are_told_apart() -> None:
    assert len({bug.name for bug in ALL}) == len(ALL)
    assert {bug.check for bug in ALL} == set(CHECKS)


def test_a_planting_whose_text_is_gone_is_reported() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"this planting no longer applies: multi/list\.cuh"):
        planted(Bug("gone", "multi/list.cuh", "no such text", "", "adamw_step"))
