"""Tests kill the mutants of the device sources: how many, by what, and that the record of it is still true.

``python -m tests.mutation run`` judges mutants by tests, ``choose`` writes from its results the samples of a whole run
(tests/samples.json) and the record (recorded.json) that these tests read. docs/mutation.md has the steps.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.emulator_harness import needs_compiler

from mutation import choose, mutator
from mutation.choose import RECORD, SAMPLES
from mutation.equivalent import EQUIVALENT
from mutation.written import WRITTEN

ROOT = Path(__file__).resolve().parents[2]
BY_COMMAND, BY_FAMILIES = 0.80, 0.97
NOT_JUDGED = 0.10  # share of mutants: kernels change more often than all mutants are judged
AGAIN = "run `python -m tests.mutation run` and `choose` (docs/mutation.md)"
NOT_THERE = 0.05  # of samples
# Files with too few places to edit.
FEW_PLACES = {"pointwise/pointwise.cu": 0, "index/sort_chunks.cu": 4}


@cache
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def of_now(key: str) -> set[str]:
    """Return the mutants under a key of the record that are still there."""
    return set(record()[key]) & set(mutator.all_mutants())


def shares() -> tuple[float, float]:
    """Return the shares of judged mutants that the README's command and runs of families kill.

    As they were judged: an edit of a kernel since then may have removed some, which says nothing about tests.
    """
    command, family, survived = (len(record()[key]) for key in ("command", "family", "survived"))
    judged = command + family + survived
    return command / judged, (command + family) / judged


@pytest.mark.one_in(1000)
def test_every_kernel_file_has_mutants() -> None:
    for file in mutator.files():
        if file.endswith(".cu"):
            wanted = FEW_PLACES.get(file, mutator.PER_KERNEL_FILE)
            assert len(mutator.mutants(file)) >= wanted, (
                f"{file} has {len(mutator.mutants(file))} mutants, not {wanted}"
            )


@pytest.mark.one_in(1000)
def test_mutants_are_edits_of_code() -> None:
    for mutant in mutator.all_mutants().values():
        text = mutator.sources.read(mutant.file).decode()
        assert mutator.planted(mutant) != text, mutant
        assert text[mutant.start : mutant.end].strip() == text[mutant.start : mutant.end], mutant


def test_a_written_mutant_whose_text_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = mutator.WRITTEN[0]
    gone = type(bug)("gone", bug.file, "no such text", "text", "")
    monkeypatch.setattr(mutator, "WRITTEN", (gone,))
    with pytest.raises(LookupError, match="expected once"):
        mutator.written(bug.file)


def test_what_is_called_equivalent_says_why() -> None:
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())


def test_the_record_is_of_these_sources() -> None:
    known = of_now("command") | of_now("family") | of_now("survived")
    unknown = sorted(set(mutator.all_mutants()) - known)
    share = len(unknown) / len(mutator.all_mutants())
    assert share <= NOT_JUDGED, f"{len(unknown)} mutants were never judged, such as {unknown[:3]}: {AGAIN}"


def test_the_command_of_the_readme_kills_most_mutants() -> None:
    command, _ = shares()
    assert command >= BY_COMMAND, f"the README's command kills {command:.1%} of mutants, expected {BY_COMMAND:.0%}"


def test_runs_of_families_kill_almost_all_mutants() -> None:
    _, families = shares()
    alive = sorted(of_now("survived"))
    assert families >= BY_FAMILIES, f"tests kill {families:.1%} of mutants, expected {BY_FAMILIES:.0%}: {alive}"


def test_written_mutants_are_killed() -> None:
    names = {f"{bug.file}:written:{bug.name.replace(' ', '_')}" for bug in WRITTEN}
    assert not names & of_now("survived")


def test_survivors_are_recorded_until_a_test_kills_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed, alive, elsewhere = sorted(mutator.all_mutants())[:3]
    empty = {"tests": [], "seconds": [], "command": {}, "family": {}, "survived": [], "never_reached": []}
    for name, content in (("RECORD", empty), ("SAMPLES", {"chosen": {}, "judged": {}})):
        monkeypatch.setattr(choose, name, tmp_path / name)
        (tmp_path / name).write_text(json.dumps(content))
    test = choose.Judged("tests/a.py::test_a[1]", 0.1, {}, always=False, killed={killed})
    assert choose.add({test.name: test}, [], {killed, alive}) == {"command": 0, "family": 1, "survived": 1}
    found = json.loads((tmp_path / "RECORD").read_text())
    assert found["family"] == {killed: 0} and found["survived"] == [alive] and elsewhere not in found["never_reached"]
    test.killed = {alive}
    assert choose.add({test.name: test}, [test.name], {alive}) == {"command": 1, "family": 0, "survived": 0}
    found = json.loads((tmp_path / "RECORD").read_text())
    assert found["command"] == {alive: 0} and found["family"] == {killed: 0} and not found["survived"]
    assert json.loads((tmp_path / "SAMPLES").read_text())["chosen"] == {"tests/a.py": ["test_a[1]"]}


def lost_samples(chosen: dict[str, list[str]], here: set[str]) -> list[str]:
    """Return the samples that are not among the tests of a run."""
    return sorted(name for file, names in chosen.items() for rest in names if (name := f"{file}::{rest}") not in here)


def gone_samples(chosen: dict[str, list[str]]) -> list[str]:
    """Return the samples whose file or function is gone."""
    gone = []
    for file, names in chosen.items():
        path = ROOT / file
        text = path.read_text() if path.is_file() else ""
        for name in names:
            function = re.sub(r"\[.*", "", name, flags=re.DOTALL).rpartition("::")[2]
            if not re.search(rf"^\s*(?:def {function}\(|{function} = )", text, re.MULTILINE):
                gone.append(f"{file}::{name}")
    return gone


def chosen_samples() -> dict[str, list[str]]:
    return json.loads(SAMPLES.read_text())["chosen"]


def test_samples_are_tests() -> None:
    """A sample without its function would silently be lost; a whole run also finds renamed cases."""
    gone = gone_samples(chosen_samples())
    assert not gone, f"{gone[:3]} are samples and no longer there: {AGAIN}"


def is_whole(config: pytest.Config) -> bool:
    """Return whether a run is part 0 of the whole suite, and nobody named tests to run or to leave out."""
    option = config.option
    where = config.invocation_params.dir
    named = {(where / arg.partition("::")[0]).resolve() for arg in config.args} - {ROOT, ROOT / "tests"}
    left_out = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "last_failed", "stepwise")
    return not named and not option.part and option.sample <= 1 and not any(getattr(option, o, None) for o in left_out)


def test_samples_are_in_a_whole_run(request: pytest.FixtureRequest) -> None:
    """Except for a few: another torch may have other dtypes and operators, and so other cases."""
    if not is_whole(request.config):
        pytest.skip("not part 0 of the whole suite")
    chosen = chosen_samples()
    lost = lost_samples(chosen, {item.nodeid for item in request.session.items})
    share = len(lost) / sum(map(len, chosen.values()))
    assert share <= NOT_THERE, f"{len(lost)} samples are no longer there, such as {lost[:3]}: {AGAIN}"


def test_what_is_lost_is_noticed() -> None:
    """A sample that nobody collects, and one without its function or file."""
    (file, (first, *_)), *_ = chosen_samples().items()
    chosen = {file: [first, "test_that_nobody_wrote[1]"], "tests/no_such_file.py": ["test_any"]}
    assert gone_samples(chosen) == [f"{file}::test_that_nobody_wrote[1]", "tests/no_such_file.py::test_any"]
    assert lost_samples(chosen, {f"{file}::{first}"}) == sorted(gone_samples(chosen))


def replay(seed: int, count: int, *options: str) -> None:
    command = [sys.executable, "-m", "tests.mutation", "replay", "--seed", str(seed), "--count", str(count), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed: ") == count


@needs_compiler
@pytest.mark.one_in(1000)
def test_a_recorded_test_kills_a_recorded_mutant(request: pytest.FixtureRequest) -> None:
    """A cheap one, another one with every part and every new record."""
    replay(zlib.crc32(RECORD.read_bytes()) + request.config.getoption("--part"), 1, "--cheap")


@needs_compiler
@pytest.mark.one_in(1000)
@pytest.mark.parametrize("seed", range(2))
def test_recorded_tests_kill_recorded_mutants(seed: int) -> None:
    """Any of them."""
    replay(zlib.crc32(RECORD.read_bytes()) + seed, 3)
