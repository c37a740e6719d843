"""Compiling for the emulator: a killed process leaves nothing behind, and clang++ works as well as g++."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from support.emulator_harness import needs_compiler, run
from support.interpreter import Program, run_python
from support.sanitized import CALLS

import rtkernels
from rtkernels.emulator import _compiler

pytestmark = needs_compiler

# A compiler that writes where compilers do, then prints its process id and waits.
_SLOW_COMPILER = """#!/bin/sh
for last; do :; done
case "$*" in
*-shared*) echo text > "${TMPDIR:-/tmp}/cc.s"; echo half > "$last"; echo $$ > "$PLACE.new"; mv "$PLACE.new" "$PLACE"
           exec sleep 60 ;;
*) exec COMPILER "$@" ;;
esac
"""
_PRIVATE = "from rtkernels.runtime.build import places; print(places.process_directory('emulator'), flush=True)"


@pytest.mark.parametrize("cache", ["rw", "off"])
def test_a_killed_compilation_leaves_nothing(cache: str, tmp_path: Path) -> None:
    temporary, place, tool = tmp_path / "tmp", tmp_path / "pid", tmp_path / "slow-c++"
    temporary.mkdir()
    tool.write_text(_SLOW_COMPILER.replace("COMPILER", _compiler.compiler().command[0]))
    tool.chmod(0o755)
    names = {"TMPDIR": temporary, "PLACE": place, "RTKERNELS_CACHE_DIR": tmp_path / "cache", "RTKERNELS_CACHE": cache}
    env = {**os.environ, **{name: str(value) for name, value in names.items()}}
    build = "from rtkernels.emulator import _build; print(_build.runtime()[0])"
    program = Program("-c", build, env={**env, "CXX": str(tool)})
    while not place.exists():
        assert program.poll() is None, program.communicate()
        time.sleep(0.01)
    os.kill(int(place.read_text()), signal.SIGSTOP)  # so that it cannot end first
    program.kill()
    os.kill(int(place.read_text()), signal.SIGKILL)
    program.communicate()
    if cache == "off":  # the next process removes it; it then has a directory of its own, until it ends
        assert len(list(temporary.iterdir())) == 1
        look = f"{_PRIVATE}; import os, tempfile; print(len(os.listdir(tempfile.gettempdir())))"
        assert run_python("-c", look, env=env).stdout.splitlines()[1:] == ["1"]
    assert list(temporary.iterdir()) == []


def test_directories_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    said = tmp_path / "said"
    living = Program("-c", f"{_PRIVATE}; open({str(said)!r}, 'x').close(); import time; time.sleep(60)", env=env)
    while not said.exists():
        assert living.poll() is None, living.communicate()
        time.sleep(0.01)
    (first,) = tmp_path.glob("rtkernels-emulator-*")
    (tmp_path / "rtkernels-emulator-link").symlink_to(tmp_path)
    second = Path(run_python("-c", _PRIVATE, env=env).stdout.strip())
    assert first.is_dir() and second.parent == tmp_path and not second.exists()
    assert (tmp_path / "rtkernels-emulator-link").is_symlink()
    living.kill()


@pytest.fixture
def clang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host compiler is clang++, if there is one."""
    found = shutil.which("clang++")
    if found is None:
        pytest.skip("clang++ is not on the path")
    monkeypatch.setenv("CXX", found)
    assert _compiler.compiler().is_clang


SAMPLE = ("norm", "scan")  # of the families, in a run of the whole suite


@pytest.mark.parametrize("folder", [f if f in SAMPLE else pytest.param(f, marks=pytest.mark.slow) for f in CALLS])
def test_kernels_by_clang(folder: str, clang: None) -> None:
    with rtkernels.emulate("sm_90"):
        CALLS[folder]()
    assert any(unit.startswith(f"{folder}/") for unit, _ in rtkernels.emulator.launched())


def test_reports_by_clang(clang: None) -> None:
    with pytest.raises(rtkernels.emulator.EmulatorError, match=r"out of bounds[\s\S]*bugs.cu:"):
        run("bugs.cu", "read_past_end", grid=2, block=64, x=torch.ones(100), y=torch.ones(100), n=100)
