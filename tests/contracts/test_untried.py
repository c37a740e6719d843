"""Device code that has not run on a GPU: never chosen, run by a test marked gpu, timed by rows of the bench."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from bench.campaign.trials import TRIALS, WITH, Trial, rows
from bench.rows import all_rows
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.launch.untried import Untried
from rtkernels.runtime.operator import registry

ROOT = Path(__file__).parents[2]


def test_every_switch_is_off_and_has_a_trial() -> None:
    registry.ops()
    assert sorted(Untried.switches) == sorted(trial.switch for trial in TRIALS)
    assert not any(Untried.switches.values())


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.switch)
def test_a_trial_has_tests_for_a_gpu_that_turn_it_on(trial: Trial) -> None:
    for test in trial.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
        assert "pytest.mark.gpu" in marks or any(re.match(r"at\(\)|at\(.*'cuda'", mark) for mark in marks), test
        own = ast.unparse(functions[name])
        fixtures = {argument.arg for argument in functions[name].args.args}
        helpers = [ast.unparse(f) for helper, f in functions.items() if f"{helper}()" in own or helper in fixtures]
        assert any(".chosen()" in text for text in (own, *helpers)), f"{test} does not turn the switch on"


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.switch)
def test_a_trial_times_calls_with_and_without(trial: Trial) -> None:
    found = [row for row in all_rows() if re.search(trial.rows, row.label)]
    assert found
    seen: list[bool] = []
    switch = Untried.switches[trial.switch]
    for off, on in zip(*[rows(found)] * 2, strict=True):
        assert (on.name, on.shape) == (off.name, off.shape + WITH)
        for row in (off, on):
            with pytest.raises(TypeError):  # without its inputs
                row.ours()
            seen.append(bool(switch))
    switch.set(False)
    assert seen == [False, True] * len(found)


def test_a_scope_turns_it_on_and_forgets_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untried, "switches", {})
    forgotten: list[bool] = []
    switch = Untried("a kernel")
    monkeypatch.setattr(Plans, "forget_all", lambda: forgotten.append(bool(switch)))
    assert not switch and Untried.switches == {"a kernel": switch}
    with pytest.raises(ZeroDivisionError), switch.chosen():
        assert switch and forgotten == [True]
        with switch.chosen():
            assert switch
        assert switch and forgotten == [True]
        1 / 0  # noqa: B018
    assert not switch and forgotten == [True, False]
