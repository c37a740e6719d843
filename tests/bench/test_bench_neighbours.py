"""What `bench neighbours` measures, and what its report says about efficiencies next to powers of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as cli
from bench import meta
from bench.measure import neighbours as sweep
from bench.measure.timing import Timer
from bench.report import neighbours


def _swept(op: str, points: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    return [
        {
            **dict.fromkeys(meta.ROW_KEYS),
            "row": op,
            "shape": f"{rows}x{cols}",
            "efficiency": efficiency,
            "peak_extra_bytes": 0,
        }
        for (rows, cols), efficiency in points.items()
    ]


def test_falls_beside_powers_of_two_are_named() -> None:
    widths = {1024: 0.90, 1536: 0.80, 2048: 0.95, 4096: 1.00, 5120: 0.84, 7168: 0.90, 8192: 0.95}
    heights = {1024: 0.70, 2048: 0.83, 4096: 0.97, 65536: 1.02}
    rows = _swept("norm", {(8192, cols): e for cols, e in widths.items()} | {(r, 4096): e for r, e in heights.items()})
    rows += _swept("flat", {(8192, 1024): 1.0, (8192, 1536): 0.99, (8192, 2048): 1.0, (4096, 2048): 0.1})
    rows.append({"row": "norm", "shape": "8192x3000", "failed": "did not run", "peak_extra_bytes": 0})
    found = neighbours.lines(rows)
    assert [(line.op, line.along, line.fixed) for line in found] == [
        ("norm", "columns", "8192 rows"),
        ("norm", "rows", "4096 columns"),
        ("flat", "columns", "8192 rows"),  # two points make no line
    ]
    assert list(found[1].points) == [1024, 2048, 4096, 8192, 65536]
    got = [(step.line.along, step.size, step.neighbour) for step in neighbours.steps(found)]
    # 1536 falls by 11 % against 1024 and 16 % against 2048, 5120 by 16 % and 12 %; 7168 by 10 % and 5 %.
    assert got == [("columns", 1536, 2048), ("columns", 5120, 4096), ("rows", 1024, 2048)]
    assert len(neighbours.steps(found, 0.14)) == 4  # 2048 rows: 14.4 % against 4096
    printed = "\n".join(neighbours.text(rows))
    assert "norm, columns at 8192 rows: 1024 0.90, 1536 0.80*, 2048 0.95" in printed
    assert "norm, 5120 columns (8192 rows): 0.840, 16% below 1.000 at 4096" in printed
    assert "- none" in "\n".join(neighbours.text(_swept("flat", {(1, 1): 1.0, (1, 2): 0.99, (1, 4): 1.0})))


def test_sweep_has_powers_of_two_beside_every_size() -> None:
    points = list(sweep.points("cpu"))
    rows = [{"row": p.name, "shape": f"{p.rows}x{p.cols}", "efficiency": 1.0} for p in points]
    found = {(line.op, line.along): line for line in neighbours.lines(rows)}
    for op in ("rms_norm_bwd", "layer_norm_fwd", "softmax_fwd", "glu_bwd", "quantize_fp8_both", "rms_norm_fp8_both"):
        widths, heights = found[op, "columns"].points, found[op, "rows"].points
        for size, below, above in ((1536, 1024, 2048), (5120, 4096, 8192), (7168, 4096, 8192)):
            assert neighbours._neighbours(size, widths) == [below, above]
        assert neighbours._neighbours(1024, heights) == [2048] and neighbours._neighbours(65536, heights) == [32768]
    assert len(found["cross_entropy_fwd", "columns"].points) == len(sweep.VOCABULARY)
    quick, full = (sweep.estimate_s(points, Timer(None, iterations)) for iterations in (30, 100))
    assert 10 < quick < full < 40  # seconds


def test_report_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _swept("norm", {(8192, 1024): 1.0, (8192, 1536): 0.5, (8192, 2048): 1.0})
    result = dict.fromkeys(meta.TOP_KEYS)
    result |= {"schema": meta.SCHEMA, "environment": meta.environment(), "rows": rows, "complete": True}
    meta.save(result, tmp_path / "sweep.json")
    assert cli.main(["report", str(tmp_path / "sweep.json")]) == 0
    assert "1536 0.50*" in capsys.readouterr().out
