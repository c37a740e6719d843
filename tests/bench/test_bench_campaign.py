"""``bench campaign``: order and shares of its parts, what is left when it is cut off, continuing, and recording."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import FakeTimer, backward_row, bench_with, measured, scale_row

from bench import __main__ as cli
from bench import meta, peers
from bench.campaign import command, parts, plugin, selection, trials
from bench.campaign.parts import Part
from bench.measure import warm
from bench.report import accepted, records
from rtkernels.runtime.launch.untried import Untried

ROOT = meta.ROOT


def _program(text: str, *words: str) -> list[str]:
    return [sys.executable, "-u", "-c", text, *words]


def _part(name: str, text: str, *words: str, weight: float = 1.0, **changes: Any) -> Part:
    return Part(name, weight, lambda seconds: _program(text, *words), "things", 1.0, **changes)


def _until(condition: Any, seconds: float = 30.0) -> bool:
    ends = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < ends:
        time.sleep(0.05)
    return bool(found)


def _is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_time_that_a_part_does_not_use_goes_to_the_next_ones() -> None:
    three = [_part("a", "", weight=5), _part("b", "", weight=2), _part("c", "", weight=3)]
    assert [parts.limit(three, i, 100.0) for i in range(3)] == [50.0, 40.0, 100.0]


@pytest.mark.one_in(1000)
def test_compilation_runs_during_tests_and_ends_before_what_measures(tmp_path: Path) -> None:
    began, lines = tmp_path / "began", []
    wait = "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\nprint('seen')"
    compiling = _program(
        "import os, sys, time, pathlib\nassert os.nice(0) == 19\nprint('compiling')\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(300)",
        str(began),
    )
    alive = "import os, sys\nprint(os.path.exists('/proc/' + open(sys.argv[1]).read()))"
    log = tmp_path / "log"
    todo = [
        _part("tests", wait, str(began), weight=8, log=tmp_path / "tests.log", measures=False),
        _part("rows", alive, str(began)),
    ]
    with log.open("w") as file:
        assert parts.run_all(todo, compiling, 60.0, lines.append, file.fileno(), {})
    assert (tmp_path / "tests.log").read_text() == "seen\n"
    assert log.read_text() == "compiling\n"
    assert [line.partition(":")[0] for line in lines] == ["tests", "tests", "compile", "rows", "False", "rows"]


@pytest.mark.one_in(1000)
def test_a_part_that_is_cut_off_leaves_its_lines_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_SECONDS", 0.5)
    monkeypatch.setattr(parts, "GRACE_SECONDS", 0.5)
    hangs = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '300'])\nprint(child.pid)\ntime.sleep(300)"
    )
    lines: list[str] = []
    todo = [_part("first", hangs), _part("second", "print('here')"), _part("third", "raise SystemExit(3)")]
    begun = time.monotonic()
    assert not parts.run_all(todo, [], 24.0, lines.append, 2, {})
    assert time.monotonic() - begun < 60
    assert lines[0].startswith("first: things, at most 8 s") and "first: cut off" in lines[2]
    assert not _is_running(int(lines[1]))
    assert "here" in lines and any(line.startswith("third: ended with 3") for line in lines)
    lines.clear()
    empty = Part("none", 1.0, lambda seconds: [], "nothing", 0.0)
    assert parts.run_all([empty], [], 20.0, lines.append, 2, {}) and lines == ["none: nothing to do"]
    assert not parts.run_all([_part("late", "")], [], 0.0, lines.append, 2, {}) and "not begun" in lines[-1]


KILLED = """
import argparse, sys, time
from pathlib import Path
from bench.campaign import command
from bench.campaign.parts import Part
folder = Path(sys.argv[1])
text = ("import json, os, pathlib, sys, time\\n"
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid()))\\n"
        "for i in range(1000): print(f'passed  0.01 s test_{i}'); time.sleep(0.02)")
class Plan:
    args = argparse.Namespace(seconds=500.0, resume=False)
    out, log, notes = folder, folder / "campaign.log", ["a note"]
    compile = lambda self: []
    environment = lambda self: {}
    parts = lambda self: [Part("tests", 1.0, lambda s: [sys.executable, "-u", "-c", text, str(folder)], "tests", 9.0,
                               folder / "tests.log", False)]
raise SystemExit(command.begin(Plan(), time.monotonic()))
"""


@pytest.mark.parametrize("by", (signal.SIGTERM, signal.SIGKILL))
def test_a_campaign_that_is_killed_leaves_valid_files(by: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with subprocess.Popen(
        _program(KILLED, str(folder)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        log = folder / "tests.log"
        assert _until(lambda: log.exists() and "test_9\n" in log.read_text(), 60.0)
        process.send_signal(by)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == (128 + by if by == signal.SIGTERM else -by)
    found = plugin.outcomes(log)
    assert len(found) >= 10 and set(found.values()) == {"passed"}
    assert [line for line in out.splitlines() if line.startswith("passed")][:2] == log.read_text().splitlines()[:2]
    assert (folder / "campaign.log").read_text().splitlines()[0] == f"source {meta.source_hash()}"
    assert "a note" in out and command.summary(folder)[0].startswith(f"tests: {len(found)} passed")
    # Its output has no reader any more, which ends it after a kill that cannot be handled, too.
    assert _until(lambda: not _is_running(int((folder / "pid").read_text())))


# ---- tests -----------------------------------------------------------------------------------------------------------

SUITE = """
import os, time
import pytest
def test_good(): pass
@pytest.mark.parametrize("name", ("two words",))
def test_named(name): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip
def test_skipped(): pass
def test_hangs(): time.sleep(300)
def test_last(): pass
"""


def _pytest(folder: Path, log: Path, *words: str) -> str:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), plugin.PATHS: "test_b.py test_a.py::test_last", plugin.LOG: str(log),
        plugin.BYTES: str(log.stat().st_size if log.exists() else 0), plugin.LIMIT: "5",
    }  # fmt: skip
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "--no-summary", "-p", "bench.campaign.plugin", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    with log.open("a") as file:
        file.write(done.stdout)
    return done.stdout


@pytest.mark.one_in(1000)
def test_lines_of_tests_a_hanging_one_and_continuing(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SUITE)
    (tmp_path / "test_b.py").write_text("def test_first(): pass\n")
    log = tmp_path / "tests.log"
    text = _pytest(tmp_path, log, "-n1", "--maxschedchunk=4", "--tb=short")
    found = plugin.outcomes(log)
    assert found == {
        "test_b.py::test_first": "passed", "test_a.py::test_last": "passed", "test_a.py::test_good": "passed",
        "test_a.py::test_named[two words]": "passed", "test_a.py::test_bad": "failed",
        "test_a.py::test_skipped": "skipped", "test_a.py::test_hangs": "failed",
    }, text  # fmt: skip
    assert list(found)[:2] == ["test_b.py::test_first", "test_a.py::test_last"]  # in the order of the paths
    assert "    E   assert 1 == 2" in text
    again = _pytest(tmp_path, log, "-p", "no:xdist", "--deselect=test_a.py::test_hangs")
    assert "test_bad" in again and "test_skipped" in again and "test_good" not in again
    alone = tmp_path / "alone.log"
    _pytest(tmp_path, alone, "-p", "no:xdist", "-k", "hangs or named")  # it ends with the one that hangs
    assert plugin.outcomes(alone) == {"test_a.py::test_named[two words]": "passed", "test_a.py::test_hangs": "began"}
    (tmp_path / "test_a.py").write_text("def test_good(): pass\n")
    assert "1 deselected" in _pytest(tmp_path, log, "test_a.py")


def test_a_lost_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plugin._is_lost()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not plugin._is_lost()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: 1 / 0)
    assert plugin._is_lost()


def test_what_changed_decides_on_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("norm", "loss", "gemm"):
        (tmp_path / "tests" / "ops" / name).mkdir(parents=True)
    (tmp_path / "tests" / "ops" / "gemm" / "test_gpu.py").write_text('@at("sm_90", "cuda")\ndef test(): pass\n')
    (tmp_path / "tests" / "ops" / "gemm" / "test_cpu.py").write_text('@at("sm_90")\ndef test(): pass\n')
    chosen = selection.tests_of
    assert chosen(["docs/README.md", "tests/ops/gemm/test_gone.py", "rtkernels/errors.py"], tmp_path) == []
    files = ["tests/ops/gemm/test_gpu.py", "tests/ops/gemm/test_cpu.py", "rtkernels/ops/loss/jsd.py"]
    assert chosen([*files, "cuda_src/norm/rms_norm.cu"], tmp_path) == [files[0], "tests/ops/norm", "tests/ops/loss"]
    shared = set(chosen(["cuda_src/ptx/mma.cuh"]))
    assert {"tests/ops/gemm", "tests/ops/attention"} <= shared and "tests/ops/sort" not in shared
    run = {"commit": "a", "date": "2026-01-02"}
    numbers = {**accepted.empty(), "runs": [run, {**run, "commit": "b", "date": "2026-01-01"}, {"date": "2027-01-01"}]}
    (tmp_path / "h200.json").write_text(json.dumps(numbers))
    assert selection.newest_commit(tmp_path) == "a" and selection.newest_commit(tmp_path / "tests") is None
    assert selection.changed_since(None) is None
    monkeypatch.setattr(meta, "_output", lambda *words: "x\ny" if "diff" in words else "z")
    assert selection.changed_since("a") == ["x", "y", "z"]


_TRIAL = trials.Trial("a b", ("tests/ops/gemm/test_scaled_mm.py::test_one",), "^scale_fwd")


# ---- rows and trials -------------------------------------------------------------------------------------------------


def test_rows_whose_peer_is_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(meta, "RESULTS", tmp_path)
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", {"fla": lambda x, by: lambda: x})
    pool = [scale_row(), backward_row()]
    monkeypatch.setattr(peers, "not_installed", lambda wanted: list(wanted))
    assert selection.rows(pool, None) == (pool[1:], ["torch"], pool[:1])
    assert selection.rows(pool, ["torch"]) == (pool, ["torch"], [])
    monkeypatch.setattr(peers, "not_installed", lambda wanted: [])
    assert selection.rows(pool, None) == (pool, ["torch", "fla"], [])


def test_rows_of_a_trial_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untried, "switches", {})
    switch, seen = Untried("kernel"), []
    monkeypatch.setattr(trials, "TRIALS", (trials.Trial("kernel", ("t.py::test",), "^scale_fwd"),))
    row = scale_row(ours=lambda x, by: (seen.append(bool(switch)), (x.float() * by).bfloat16())[1])
    timed = list(trials.rows([row, backward_row()], ["kernel"]))
    assert [each.shape for each in timed] == ["8x16", "8x16, untried"] and not list(trials.rows([row], ["other"]))
    got = measured(timed, [], FakeTimer((1.0, 1.0, 30.0, 30.0, 1.0, 1.0, 20.0, 20.0, 1.0)))["rows"]
    assert seen == [False] * (len(seen) // 2) + [True] * (len(seen) // 2)
    assert trials.text(got) == ["scale_fwd 8x16: 30.0 us, 20.0 us with it (1.50 times as fast)"]
    assert trials.tried({"t.py::test[a]": "passed", "t.py::test_b": "failed"}) == ["kernel"]
    assert trials.tried({"t.py::test[a]": "passed", "t.py::test[b]": "failed"}) == trials.tried({}) == []
    assert trials.tried({"t.py::test[a]": "passed", "t.py::test[b]": "began"}) == []
    args = cli.parser().parse_args(["run", "--trial=a b", "--trial=c", "--compile", "--jobs=2"])
    assert warm.options(args) == ["--trial=a b", "--trial=c", "--compile"]


def test_compilation_shares_device_leaves_memory_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    for shared in (False, True):
        assert warm.part([], "1/4", bench_with(FakeTimer(), []), [], 9.0, shares_device=shared) == 0
    assert shares == [0.125]


def test_rows_get_the_commit_of_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured([scale_row()], [], path=tmp_path / "rows.json")
    monkeypatch.setattr(meta, "_output", lambda *words: "")
    monkeypatch.delenv("BENCH_COMMIT", raising=False)

    def write(**changes: Any) -> None:
        result = meta.load(tmp_path / "rows.json")
        result["environment"] |= {"gpu": "NVIDIA Z1", "commit": None, **changes}
        meta.save(result, tmp_path / "rows.json")

    write()
    with pytest.raises(meta.ResultError, match="Set BENCH_COMMIT"):
        records.of_campaign(tmp_path)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(meta, "RESULTS", tmp_path)
    (tmp_path / "history").mkdir()
    assert cli.main(["record", str(tmp_path)]) == 0
    numbers = accepted.load(tmp_path / "z1.json")
    assert numbers["runs"][0]["commit"] == "0123abc" and [row["row"] for row in numbers["rows"]] == ["scale_fwd"]
    write(source="other")
    with pytest.raises(meta.ResultError, match="measured of source other"):
        records.of_campaign(tmp_path)
    write(source="other", commit="def")
    assert records.of_campaign(tmp_path)["environment"]["commit"] == "def"
    assert cli.main(["record", str(tmp_path / "history")]) == 2


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_plan_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command._Plan, "collected", lambda self: 40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Untried, "switches", {})
    Untried("a b")
    monkeypatch.setattr(trials, "TRIALS", (_TRIAL,))
    out = tmp_path / "out"
    words = ["campaign", "--out", str(out), "--seconds=1000", "--peers=torch", "--tests", "tests/optim", "--jobs=3"]
    assert cli.main([*words, "--dry"]) == 0 and not out.exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:6]] == ["compile", "tests", "trials", "rows", "sweep"]
    assert "in 3 processes" in lines[1] and "40 tests" in lines[2] and "at most 333 s" in lines[2]
    assert "--tests tests/ops/gemm/test_scaled_mm.py" in lines[-1] and "tests/optim" in lines[-1]
    assert cli.main(words) == 2 and "no CUDA device" in capsys.readouterr().err
    for wrong in ("--peers=nobody", "--parts=rows,cake"):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["campaign", "--out=x", wrong])


def test_commands_of_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untried, "switches", {})
    Untried("a b")
    monkeypatch.setattr(trials, "TRIALS", (_TRIAL,))
    words = ["campaign", "--out", str(tmp_path), "--parts=sweep,trials,rows,e2e", "--peers=none", "--seed=4"]
    plan = command._Plan(cli.parser().parse_args(words))
    found = {part.name: part for part in plan.parts()}
    assert list(found) == ["tests", "trials", "rows", "sweep", "e2e"]
    assert [name for name, part in found.items() if not part.measures] == ["tests"]
    assert plan.tests == [test for trial in trials.TRIALS for test in trial.tests]
    assert plan.pytest()[-1] == "tests/ops/gemm/test_scaled_mm.py"
    for part in (found["rows"], found["sweep"]):  # which parse
        args = cli.parser().parse_args(part.command(100.0)[4:])
        assert args.seconds == 85.0 and args.out.parent == tmp_path
    rows = cli.parser().parse_args(found["rows"].command(10.0)[4:])
    assert rows.missing and rows.resume and rows.seconds == 5.0
    assert cli.parser().parse_args(plan.compile()[4:]).compile
    assert found["trials"].command(100.0) == []  # no test has passed
    tests = [test for trial in trials.TRIALS[:1] for test in trial.tests]
    (tmp_path / "tests.log").write_text("".join(f"passed  0.10 s {test}[a b]\n" for test in tests))
    args = cli.parser().parse_args(found["trials"].command(100.0)[4:])
    assert args.trial == [trials.TRIALS[0].switch] and args.peers == []
    environment = plan.environment()
    assert int(environment[plugin.BYTES]) == (tmp_path / "tests.log").stat().st_size
    assert "RTKERNELS_CACHE_DIR" in environment


def test_a_folder_is_continued_with_the_same_sources(tmp_path: Path) -> None:
    args = cli.parser().parse_args(["campaign", "--out", str(tmp_path / "x"), "--parts=rows"])
    plan = command._Plan(args)
    assert command._check_folder(plan) is None
    plan.log.write_text("source other\n")
    assert "--resume continues" in command._check_folder(plan)
    args.resume = True
    assert "Choose another --out" in command._check_folder(plan)
    plan.log.write_text(f"source other\nsource {meta.source_hash()}\n[ 1.0] commit\n")
    assert command._check_folder(plan) is None
    measured([scale_row(), backward_row(ours=lambda **given: 1 / 0)], [], path=plan.out / "rows.json")
    lines = command.summary(plan.out)
    assert lines[0] == "rows.json: 2 measured, 1 of them failed" and "ZeroDivisionError" in lines[1]
