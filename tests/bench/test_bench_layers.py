"""`python -m bench.layers --tiny`: every way of ours is as close to fp32 as transformers' own code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import layers
from rtkernels.models import fp8

pytest.importorskip("transformers", minversion="5.0")


WAYS = {"dense": ("ours_fused", "fp8_fused"), "head": ("ours",), "moe": ("ours", "fp8")}


ROW = {"error_output": 1e-3, "error_gradients": 2e-3, "worst": "x", "forward_and_backward_ms": 1.0}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "ways"), WAYS.items(), ids=WAYS)
def test_errors_of_the_ways(kind: str, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_SMALLEST_GAIN", 0)
    args = layers.parser().parse_args([kind, "--tiny", "--runs", "1"])
    bench = layers.Bench(kind, layers.KINDS[kind].tiny, args)
    plain, *rows = (bench.measure(way) for way in ("transformers", *ways))
    for way, row in zip(ways, rows, strict=True):
        coarse = way.startswith("fp8")
        assert row["error_output"] <= (0.1 if coarse else 1.1 * plain["error_output"]), row
        assert row["error_gradients"] <= (0.25 if coarse else 1.1 * plain["error_gradients"]), row
        if coarse:  # a comparison that sees codes
            assert row["error_output"] > 2 * plain["error_output"]


def test_liger_is_last() -> None:
    for kind in layers.KINDS:
        assert layers.ways_of(kind, None)[-1] == "liger"
    assert layers.ways_of("head", "liger,ours,fp8") == ["ours", "liger"]


def test_each_way_is_printed_and_written_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dense.json"
    ends: dict[str, Any] = {"eager": ROW, "transformers": ZeroDivisionError("upset"), "liger": ImportError("no Liger")}

    class Stand:
        device = "cpu"

        def __init__(self, *given: Any) -> None: ...

        def measure(self, way: str) -> Any:
            assert "did not end within 60 s" in json.loads(out.read_text())[way]["failed"]  # if it never returns
            assert len(capsys.readouterr().out.splitlines()) == (way != "eager")
            if isinstance(ends[way], Exception):
                raise ends[way]
            return ends[way]

    monkeypatch.setattr(layers, "Bench", Stand)
    options = ["--tiny", "--one", "dense", "--out", str(out), "--ways", "liger,eager,transformers"]
    layers.main(options)
    failed = {"failed": "ZeroDivisionError: upset"}
    assert json.loads(out.read_text()) == {"eager": ROW, "transformers": failed, "liger": {"absent": "no Liger"}}
    assert "absent: no Liger" in capsys.readouterr().out
    monkeypatch.setattr(layers, "Bench", None)  # nothing is measured again
    layers.main(options)


def test_a_process_that_ends_early_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[str] = []

    class Process:
        """Measures one way, then hangs in the second and is ended; the next one measures the third."""

        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            kind, file = command[command.index("--one") + 1], Path(command[-1])
            started.append(kind)
            rows = json.loads(file.read_text())
            late = "eager" in rows
            rows |= {"transformers": ROW} if late else {"eager": ROW, "ours": {"failed": "did not end"}}
            file.write_text(json.dumps(rows))
            self.returncode = 0 if late else 1

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(layers, "subprocess", SimpleNamespace(Popen=Process))
    out = tmp_path / "layers.json"
    options = ["head", "dense", "--tiny", "--ways", "eager,ours,transformers", "--out", str(out)]
    found = layers.main(options)
    assert started == ["head", "head", "dense", "dense"]
    assert json.loads(out.read_text())["layers"] == found
    row = found["layer_dense"]["rows"][0]
    assert row["eager"] == row["transformers"] == ROW and row["ours"] == {"failed": "did not end"}
    assert row["hidden"] == layers.KINDS["dense"].tiny["hidden"]
    monkeypatch.setattr(Process, "__init__", lambda self, command, env: setattr(self, "returncode", 0))
    again = layers.main([*options, "--continue"])  # what failed is measured again
    assert "ours" not in again["layer_dense"]["rows"][0] and again["layer_dense"]["rows"][0]["eager"] == ROW


@pytest.mark.slow
def test_the_command_starts_processes(tmp_path: Path) -> None:
    found = layers.main(["head", "--tiny", "--ways", "transformers,ours", "--together", "--runs", "2"])
    assert set(found["layer_head"]["rows"][0]) >= {"transformers", "ours"}
    for way in ("transformers", "ours"):
        assert "error_output" in found["layer_head"]["rows"][0][way]
        assert len(found["layer_head"]["rows"][0][way]["runs_ms"]) == 2
