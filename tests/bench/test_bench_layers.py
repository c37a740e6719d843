"""`python -m bench.layers --tiny`: every way of ours is as close to fp32 as transformers' own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import layers
from rtkernels.models import fp8

pytest.importorskip("transformers", minversion="5.0")


WAYS = {"dense": ("ours_fused", "fp8_fused"), "head": ("ours",), "moe": ("ours", "fp8")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "ways"), WAYS.items(), ids=WAYS)
def test_errors_of_the_ways(kind: str, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_SMALLEST_GAIN", 0)
    args = layers.parser().parse_args([kind, "--tiny"])
    with layers._references() as environment:
        monkeypatch.setenv(*environment.popitem())
        plain, *rows = (layers.run_way(way, args)[kind] for way in ("transformers", *ways))
    for way, row in zip(ways, rows, strict=True):
        coarse = way.startswith("fp8")
        assert row["error_output"] <= (0.1 if coarse else 1.1 * plain["error_output"]), row
        assert row["error_gradients"] <= (0.25 if coarse else 1.1 * plain["error_gradients"]), row
        if coarse:  # a comparison that sees codes
            assert row["error_output"] > 2 * plain["error_output"]


def test_records_of_the_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"error_output": 1e-3, "error_gradients": 2e-3, "worst": "x", "forward_and_backward_ms": 1.0}
    results = {
        "ours": {"dense": row, "head": row},
        "liger": {"absent": "no Liger"},
        "ours_fused": {"failed": "out of it"},
    }
    monkeypatch.setattr(layers.processes, "records", lambda *args: results.items())
    out = tmp_path / "layers.json"
    found = layers.main(["dense", "head", "--tiny", "--ways", "ours,liger,ours_fused", "--out", str(out)])
    assert json.loads(out.read_text())["layers"] == found
    assert found["layer_dense"]["rows"][0]["ours"] == found["layer_head"]["rows"][0]["ours"] == row
    assert found["layer_dense"]["rows"][0]["ours_fused"] == {"failed": "out of it"}
    assert "ours_fused" not in found["layer_head"]["rows"][0]  # a head has no such way
    printed = capsys.readouterr().out
    assert "absent: no Liger" in printed and "failed: out of it" in printed


@pytest.mark.slow
def test_the_command_starts_processes(tmp_path: Path) -> None:
    found = layers.main(["head", "--tiny", "--ways", "transformers,ours", "--together"])
    assert set(found["layer_head"]["rows"][0]) >= {"transformers", "ours"}
    assert all("error_output" in found["layer_head"]["rows"][0][way] for way in ("transformers", "ours"))
