"""What type checkers are told (``rtkernels/__init__.pyi``) is what calls return and accept.

``types/calls.py`` has calls that say what they expect: mypy reads them, and they are run. A function of which the stub
says what its module says is called as ``samples/<family>/<op>.py`` calls it, and returns what its annotation says.
``types/wrong_calls.py`` has calls that mypy must refuse.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pieces

import rtkernels
from contracts import test_dynamic_rows
from contracts.samples import collected
from contracts.types import calls
from rtkernels import ArgumentError, _public

FOLDER = Path(__file__).parent / "types"
ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("make_stub", ROOT / "docs" / "make_stub.py")
make_stub = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_stub)
FUNCTIONS = sorted(name for name in _public.OPS if inspect.isfunction(getattr(rtkernels, name)))
# Options whose words cannot be read from an error of the plainest call, and why.
NOT_COMPARED = {
    ("fp8_linear", "scale_layout"): "looked at for an x of codes only",
    ("quantize_fp8_experts", "output"): "another name of layout, which the error names",
    ("moe_permute_fp8", "output"): "another name of layout, which the error names",
}


@pytest.mark.every_op
def test_the_stub_is_written_from_the_sources() -> None:
    written = (ROOT / "rtkernels" / "__init__.pyi").read_text(encoding="utf-8")
    stale = written != make_stub.stub()
    assert not stale, "rtkernels/__init__.pyi is out of date. It is generated: run python docs/make.py"


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[tuple[dict[str, Any], Any]]]:
    """Every call of ``types/calls.py``: by function its arguments and what came."""
    found: dict[str, list[tuple[dict[str, Any], Any]]] = {name: [] for name in FUNCTIONS}
    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            patch.setattr(rtkernels, name, _spy(getattr(rtkernels, name), found[name]))
        with torch.no_grad():
            for family in calls.ALL:
                family()
            for name, call in collected("CALLS").items():
                if not found[name.partition(",")[0]]:
                    call(*test_dynamic_rows._inputs(6))
    return found


def _spy(function: Callable[..., Any], seen: list[tuple[dict[str, Any], Any]]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        seen.append((dict(inspect.signature(function).bind(*args, **kwargs).arguments), result))
        return result

    return called


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_of_every_function_return_what_they_are_declared_to(name: str, recorded: dict[str, Any]) -> None:
    assert recorded[name], (
        pieces.call(name, test_dynamic_rows.OWNERS[name], collected("CALLS"))
        or f"write a call of {name} in tests/contracts/types/calls.py"
    )
    declared = str(inspect.signature(getattr(rtkernels, name)).return_annotation)
    if declared == "Tensor":
        for arguments, result in recorded[name]:
            assert isinstance(result, torch.Tensor), f"{name}({', '.join(arguments)}) is declared to return a Tensor"


def _fits(case: dict[str, str], arguments: dict[str, Any]) -> bool:
    """Return whether a call has what decides a case of `RESULTS`."""
    for name, wanted in case.items():
        value = arguments.get(name)
        given = value is not None and value is not False
        if wanted == make_stub.ABSENT:
            if given:
                return False
        elif wanted.startswith('Literal["'):
            if value != wanted.partition('"')[2].partition('"')[0] and (given or "=" not in wanted):
                return False
        elif not given and "= None" not in wanted:
            return False
        elif wanted == "Quant" and not isinstance(value, rtkernels.Quant):
            return False
        elif wanted.startswith("torch.dtype") and not isinstance(value, torch.dtype | str):
            return False
        elif wanted in ("Tensor", "Sequence[Tensor]") and (wanted == "Tensor") is isinstance(value, list):
            return False
    return True


def _spelled(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return "Tensor"
    if type(result) is tuple:
        return f"tuple[{', '.join(map(_spelled, result))}]"
    return f"list[{_spelled(result[0])}]" if isinstance(result, list) else type(result).__name__


@pytest.mark.parametrize("name", make_stub.RESULTS)
def test_every_case_of_a_function_is_called_and_right(name: str, recorded: dict[str, Any]) -> None:
    """The first case that fits a call, as a checker chooses it, declares what came; each case is the first of one."""
    cases = make_stub.RESULTS[name]
    reached = set()
    for arguments, result in recorded[name]:
        first = next(i for i, (case, _) in enumerate([*cases, ({}, "")]) if _fits(case, arguments))
        assert first < len(cases), f"{name}({', '.join(arguments)}) fits no case"
        assert _spelled(result) in cases[first][1].split(" | "), f"case {cases[first]}"
        reached.add(first)
    open_ended = {i for i, (case, _) in enumerate(cases) if case in ({}, make_stub._NVFP4)}
    assert reached | open_ended == set(range(len(cases))), [cases[i] for i in set(range(len(cases))) - reached]


def _options() -> list[tuple[str, str]]:
    found = []
    for name in FUNCTIONS:
        for p in inspect.signature(getattr(rtkernels, name)).parameters.values():
            if "str" in str(p.annotation) and p.name != "quant" and (name, p.name) not in make_stub.NO_WORDS:
                found.append((name, p.name))
    return found


@pytest.mark.parametrize(("name", "option"), _options())
def test_options_are_the_words_that_errors_name(name: str, option: str, recorded: dict[str, Any]) -> None:
    words = make_stub.words(name, option)
    parameter = inspect.signature(getattr(rtkernels, name)).parameters[option]
    assert parameter.default in (None, inspect.Parameter.empty, *words)
    if (name, option) in NOT_COMPARED:
        return
    arguments = {**recorded[name][0][0], option: "no_such_word"}
    with pytest.raises(ArgumentError) as caught:
        getattr(rtkernels, name)(**arguments)
    text = str(caught.value)
    assert f"{option} is 'no_such_word'" in text
    listed = re.findall(r"[\w.]+", text.partition("expected")[2].replace("None", "").replace(" a pair of these", ""))
    assert set(listed) - {"one", "of", "or"} == set(words)


def _mypy(*files: str, cache: Path) -> list[str]:
    pytest.importorskip("mypy")
    command = [
        *(sys.executable, "-m", "mypy", "--python-version", "3.10", "--follow-imports", "silent"),
        *("--ignore-missing-imports", "--no-site-packages", "--hide-error-context", "--cache-dir", str(cache), *files),
    ]
    env = {**os.environ, "MYPYPATH": f"{FOLDER / 'stubs'}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of the stub itself, of right and of wrong calls."""
    files = ("rtkernels/__init__.pyi", "tests/contracts/types/calls.py", "tests/contracts/types/wrong_calls.py")
    return _mypy(*files, cache=tmp_path_factory.mktemp("mypy"))


@pytest.mark.one_in(1000)
def test_mypy_takes_typical_calls_of_every_function(errors: list[str]) -> None:
    assert [line for line in errors if "wrong_calls.py" not in line] == []


@pytest.mark.one_in(1000)
def test_mypy_refuses_wrong_calls(errors: list[str]) -> None:
    text = (FOLDER / "wrong_calls.py").read_text(encoding="utf-8").splitlines()
    wanted = {i for i, line in enumerate(text, 1) if line.endswith("# wrong")}
    found = {int(line.split(":")[1]) for line in errors if "wrong_calls.py" in line}
    assert len(wanted) > 20 and found == wanted
