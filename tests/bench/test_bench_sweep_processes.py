"""The processes of ``bench sweep``: several that compile, one that measures and is replaced when it breaks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_sweep import Device, one_family  # noqa: F401

from bench import __main__ as cli
from bench.sweep import command, families, measure, supervise


def _programs(monkeypatch: pytest.MonkeyPatch, *programs: str) -> list[list[str]]:
    """Let processes of the sweep run these programs in turn; return their options."""
    started: list[list[str]] = []

    def line(arguments: list[str], *extra: str) -> list[str]:
        started.append([*arguments, *extra])
        return [sys.executable, "-c", programs[min(len(started), len(programs)) - 1]]

    monkeypatch.setattr(supervise, "command", line)
    return started


def test_a_process_that_loses_the_device_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = _programs(monkeypatch, "raise SystemExit(3)", "import os; os.abort()", "raise SystemExit(0)")
    lines: list[str] = []
    assert supervise.measure_all(["--seed=1"], tmp_path / "m", 30.0, 60.0, lines.append) == 0
    assert len(lines) == 2 and [words[2] for words in started] == ["first", "next", "next"]


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _programs(monkeypatch, "import time; time.sleep(60)", "raise SystemExit(0)")
    start = time.monotonic()
    assert supervise.measure_all([], tmp_path / "m", 1.0, 60.0, lambda text: None) == 0
    assert time.monotonic() - start < 20
    assert supervise.measure_all([], tmp_path / "m", 1.0, -1.0, lambda text: None) == 1  # no time left


def test_compiling_processes_share_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    started = _programs(monkeypatch, "pass")
    supervise.compile_all(["--seed=1"], 2, 20.0, lambda text: None)
    assert [words[2] for words in started] == ["0/2", "1/2"]


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["sweep"]) == 2 and "nothing is measured" in capsys.readouterr().err
    assert cli.main(["sweep", "--family", "nothing_like_it"]) == 2
    assert "known: mm_bf16" in capsys.readouterr().err
    args = cli.parser().parse_args(["sweep", "--seed", "4", "--family", "mm|rope", "--peers", "torch"])
    again = cli.parser().parse_args(["sweep", *command._shared(args)])
    assert (again.seed, again.family, again.peers, again.out) == (4, "mm|rope", "torch", args.out)


class Simulated(Device):
    """A device on which every event is 5 µs after the last one."""

    def __init__(self) -> None:
        self.now = 0.0

    def spin(self, us: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def event(self) -> float:
        self.now += 5.0
        return self.now

    def reached(self, event: float) -> bool:
        return False

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.one_in(1000)
def test_the_whole_command_on_a_simulated_device(
    one_family: dict[str, families.Draw],  # noqa: F811
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Everything but the processes: they run here, one after the other."""
    from bench.measure import timing

    real, parts = measure.Sweep, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "simulated")
    monkeypatch.setattr(timing, "CudaDevice", Simulated)
    monkeypatch.setattr(measure, "Sweep", lambda timer, device, *rest: real(timer, "cpu", *rest))

    def here(*words: str) -> int:
        return cli.main(["sweep", *words])

    def compile_all(arguments: list[str], jobs: int, seconds: float, log: Any) -> None:
        parts.extend(here(*arguments, "--part", f"{i}/{jobs}", "--seconds", f"{seconds:g}") for i in range(jobs))

    def measure_all(arguments: list[str], marker: Path, patience: float, seconds: float, log: Any) -> int:
        return here(*arguments, "--child", "first", "--seconds", f"{seconds:.1f}")

    monkeypatch.setattr(supervise, "compile_all", compile_all)
    monkeypatch.setattr(supervise, "measure_all", measure_all)
    path = tmp_path / "s.json"
    options = ("--seed", "1", "--draws", "3", "--out", str(path), "--peers", "torch")
    assert here(*options, "--jobs", "2") == 0
    assert parts == [0, 0]
    text = capsys.readouterr().out
    assert "2 families, 6 draws to measure, 0 in" in text and "| scale | 3 | 1.00 |" in text
    result = measure.load(path)
    assert result["complete"] and len(result["draws"]) == 6 and not path.with_suffix(".json.running").exists()
    assert here(*options) == 0 and "0 draws to measure, 6 in" in capsys.readouterr().out
    assert here(*options[:2], "--draws", "4", *options[4:], "--family", "scale", "--seconds", "-1") == 1  # no time
    assert here("--seed", "2", *options[2:]) == 2 and "seed 1; expected 2" in capsys.readouterr().err
