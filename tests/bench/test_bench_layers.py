"""`python -m bench.layers --tiny`: every way of ours is as close to fp32 as transformers' own code."""

from __future__ import annotations

import pytest

from bench import layers
from rtkernels.models import fp8

pytest.importorskip("transformers", minversion="5.0")


WAYS = {"dense": "ours_fused,fp8_fused", "head": "ours", "moe": "ours,fp8"}


@pytest.mark.parametrize(("kind", "ways"), WAYS.items(), ids=WAYS)
def test_errors_of_the_ways(kind: str, ways: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(fp8, "_SMALLEST_GAIN", 0)
    out = tmp_path / "layers.json"
    made = layers.main([kind, "--tiny", "--ways", f"transformers,{ways}", "--out", str(out)])
    (row,) = made[f"layer_{kind}"]["rows"]
    plain = row["transformers"]
    for way in ways.split(","):
        coarse = way.startswith("fp8")
        assert row[way]["error_output"] <= (0.1 if coarse else 1.1 * plain["error_output"]), row
        assert row[way]["error_gradients"] <= (0.25 if coarse else 1.1 * plain["error_gradients"]), row
        if coarse:  # a comparison that sees codes
            assert row[way]["error_output"] > 2 * plain["error_output"]
    assert out.exists()
