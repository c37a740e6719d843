"""``bench e2e post``: its gates, and a tiny step of every kind where TRL is installed."""

from __future__ import annotations

import pytest

from bench.e2e import post


def test_gates_are_relative_to_trl() -> None:
    arms = {
        "trl": {"step_ms": 100.0, "peak_mib": 10},
        "ours": {"step_ms": 50.0, "peak_mib": 8},
        "ours_fused": {"absent": "x"},
    }
    found = [(gate["arm"], gate["value"]) for gate in post.gates(arms)]
    assert found == [("ours", 2.0), ("ours", 0.8)]
    assert post.gates({"ours": arms["ours"]}) == []


def test_losses_are_compared() -> None:
    arms = {arm: {"step_ms": 1.0, "peak_mib": None, "losses": [loss]} for arm, loss in (("trl", -0.5), ("ours", -0.51))}
    gate = post.gates(arms, "grpo")[-1]
    assert gate["limit"] == post.LOSSES["grpo"] and gate["value"] == pytest.approx(0.02)


@pytest.mark.parametrize("step", post.STEPS)
def test_arms_have_the_same_losses(step: str) -> None:
    pytest.importorskip("trl", minversion="1.15")
    args = post.parser().parse_args(["--tiny", "--step", step, "--steps", "1", "--warmup", "1"])
    theirs, ours = (post.run_arm(arm, args)["losses"] for arm in ("trl", "ours"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4, abs=1e-6)
    assert abs(theirs[0]) > 1e-3  # a loss of 0 would say nothing
