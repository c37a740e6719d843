"""`python -m bench e2e --tiny`: the arms run on a CPU, decode the same tokens, and give records that can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.e2e import gates, infer, plot, train
from rtkernels.models import fp8

pytest.importorskip("transformers", minversion="5.0")

INFER = "--tiny --vocab 200 --prompt 12 --new 4 --prefill 1,2 --decode 1 --repeats 1".split()
TRAIN = "--tiny --vocab 500 --tokens 64 --seq 32 --steps 2 --warmup 1".split()
COMPILED = pytest.mark.slow


def inferred(arm: str) -> dict[str, Any]:
    return infer.run_arm(arm, infer.parser().parse_args(INFER))


def trained(arm: str, model: str = "dense") -> dict[str, Any]:
    return train.run_arm(arm, train.parser().parse_args([*TRAIN, "--model", model]))


def test_arms_of_inference() -> None:
    arms = {arm: inferred(arm) for arm in ("hf", "ours", "ours_graph", "fp8")}
    assert arms["ours"]["tokens"] == arms["ours_graph"]["tokens"] == arms["hf"]["tokens"]
    for record in arms.values():
        assert record["prefill"]["2"]["tokens_per_s"] > 0 and record["decode"]["1"]["ms_per_token"] > 0
    found = {gate["gate"]: gate for gate in infer.gates(arms)}
    assert found["fp32 tokens, ours_graph = hf"]["passed"]
    assert set(found["prefill, ours : hf"]) == {"gate", "value", "must", "passed"}
    assert not infer.gates({"hf": {"tokens": "a"}, "ours": {"tokens": "b"}})[0]["passed"]


@COMPILED
def test_the_compiled_arm_of_inference() -> None:
    assert inferred("hf_compile")["tokens"] == inferred("hf")["tokens"]


def test_arms_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_SMALLEST_GAIN", 0)
    wanted = trained("hf")["losses"]
    assert trained("ours_fused")["losses"] == pytest.approx(wanted, rel=1e-3)
    record = trained("fp8")
    assert record["losses"] == pytest.approx(wanted, rel=2e-2) and record["losses"] != wanted
    assert "fused" in record["note"] and "fp8" in record["note"]


@COMPILED
@pytest.mark.parametrize("arm", ["compile", "ours_compile"])
def test_compiled_arms_of_training(arm: str) -> None:
    assert trained(arm)["losses"] == pytest.approx(trained("hf")["losses"], rel=1e-3)


@COMPILED
def test_the_command_starts_processes(tmp_path: Path) -> None:
    assert infer.main([*INFER, "--arms", "hf,ours", "--out", str(tmp_path / "infer.json")]) == 0
    result = json.loads((tmp_path / "infer.json").read_text())
    assert result["kind"] == "infer" and all(g["passed"] for g in result["gates"] if "tokens" in g["gate"])


def test_gates_of_training() -> None:
    hf = {"tokens_per_s": 100, "peak_mib": 1000, "losses": [3.0] * 10, "first_step_s": 9.0}
    ours = {"tokens_per_s": 160, "peak_mib": 600, "losses": [3.0] * 9 + [3.02], "first_step_s": 10.0}
    found = {
        g["gate"]: g["passed"] for g in gates.gates("dense", {"hf": hf, "ours_fused": ours, "liger": {"absent": ""}})
    }
    assert found == {
        "tokens/s, ours_fused : hf": True, "peak memory, ours_fused : hf": False, "loss, ours_fused : hf": False,
        "first step, ours_fused - hf, s": True,
    }  # fmt: skip
    assert "MISSED: peak memory, ours_fused : hf: 0.6 (must 0.5)" in gates.text(
        gates.gates("dense", {"hf": hf, "ours_fused": ours})
    )


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main([str(tmp_path)]) == 2 and "no result files" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    rate = {"tokens_per_s": 5, "ms": 1.0}
    arm = {"step_ms": 1.0, "tokens_per_s": 10, "peak_mib": None, "losses": [3.0, 2.0]}
    (tmp_path / "train.json").write_text(json.dumps({"model": "dense", "arms": {"hf": arm, "liger": {"absent": "x"}}}))
    arms = {"hf": {"prefill": {"1": rate}, "decode": {"1": rate}}, "ours": {"failed": "x"}}
    (tmp_path / "infer.json").write_text(json.dumps({"kind": "infer", "model": "moe", "arms": arms}))
    (tmp_path / "other.json").write_text("{}")
    assert plot.main([str(tmp_path)]) == 0 and (tmp_path / "plot.png").stat().st_size > 1000
