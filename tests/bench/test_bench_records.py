"""Peak of the tensor cores, rows without a record, and runs that compile first and can be continued."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import FakeTimer, backward_row, bench_with, measured, scale_row

from bench import __main__ as cli
from bench import meta, peers
from bench.measure import peak, run, warm
from bench.report import accepted, readme, records, tables
from bench.rows import all_rows
from rtkernels.runtime import targets

# Rows without a record, which the next recorded run measures: `python -m bench run --missing --record`.
WITHOUT_RECORD = {
    "kda_bwd 8x4096 32 heads of 128",
    *(
        f"ssd_bwd {shape} groups of 128"
        for shape in ("1x8192 128 heads of 64, 8", "1x8192 128 heads of 64, 1", "8x4096 64 heads of 64, 1")
    ),
}


def test_every_row_has_a_record_with_its_commit() -> None:
    rows = list(all_rows())
    missing = {row.label for row in records.missing(rows, meta.RESULTS)}
    new = sorted(missing - WITHOUT_RECORD)
    assert not new, f"measure them with `python -m bench run --missing --record`: {new}"
    declared = {row.label for row in rows}
    assert declared >= WITHOUT_RECORD, f"no rows any more: {sorted(WITHOUT_RECORD - declared)}"
    assert missing >= WITHOUT_RECORD, f"they have a record now: {sorted(WITHOUT_RECORD - missing)}"


def test_missing_rows_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured([scale_row(), backward_row()], [])
    result["environment"] |= {"gpu": "NVIDIA H200", "commit": "abc"}
    numbers = accepted.empty()
    accepted.record(numbers, result)
    accepted.save(numbers, tmp_path / "h200.json")
    rows = [scale_row(), backward_row(), scale_row(shape="9x9")]
    assert [row.shape for row in records.missing(rows, tmp_path)] == ["9x9"]
    products = [scale_row(flops=10), backward_row()]
    assert records.without_peak(products, tmp_path) == products[:1]
    numbers["rows"][0]["of_peak"] = 0.5
    accepted.save(numbers, tmp_path / "h200.json")
    assert records.without_peak(products, tmp_path) == []
    numbers["runs"][0]["commit"] = None
    accepted.save(numbers, tmp_path / "h200.json")
    assert records.missing(rows, tmp_path) == rows
    assert records.missing(rows, tmp_path / "nothing") == rows
    monkeypatch.setattr(meta, "RESULTS", tmp_path)
    assert cli.main(["check", "--missing", "--rows", "^sdpa"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 rows have no record with a commit"


# ---- the peak ------------------------------------------------------------------------------------------------------


def test_peak_compiles_without_spills_or_serialised_products() -> None:
    from rtkernels.runtime.build import nvrtc

    target = targets.parse("sm_90a")
    expressions = [peak.KERNEL.expression(variant) for variant, _ in peak.KINDS.values()]
    compiled = nvrtc.compile_unit(peak.KERNEL.unit, expressions, target)
    for used in compiled.resources.values():
        assert used.spill_stores == used.spill_loads == used.stack == 0
        assert used.registers <= peak.KERNEL.max_registers
        assert used.shared <= 48 << 10
    assert "serialized" not in compiled.log
    assert not peak.KERNEL.supports(targets.parse("sm_80"))


def test_share_of_the_peak() -> None:
    clocks = peak.flops("bf16", 132) / (132 * 4096)  # operations of bf16 per SM and clock
    assert 3.5e-3 < clocks / 1.755e9 < 10e-3  # seconds of a launch
    assert peak.flops("fp8", 132) == peak.flops("int8", 132) == 2 * peak.flops("bf16", 132)
    row = {"dtype": "bfloat16", "tflops": 400.0}
    assert peak.share(row, {"bf16": 800.0}) == 0.5
    assert peak.share({**row, "dtype": "float8_e4m3fn"}, {"bf16": 800.0, "fp8": 1600.0}) == 0.25
    assert peak.share({"dtype": "bfloat16"}, {"bf16": 800.0}) is None
    for without in ({}, None, {"error": "no wgmma"}):
        assert peak.share(row, without) is None
    assert peak.share({"failed": "x"}, {"bf16": 800.0}) is None


def test_products_have_the_share_in_results_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "try_measure", lambda timer: {"bf16": 2.0e-6})
    got = measured([scale_row(flops=10), backward_row()], [])
    assert got["rows"][0]["of_peak"] == pytest.approx(0.5) and "of_peak" not in got["rows"][1]
    lines = tables.row_table(got)
    assert "of the peak" in lines[0] and "| 0.50 |" in lines[2]
    assert "Tensor cores: bf16 0 TFLOP/s" in tables.heading(got)
    assert "of the peak" not in tables.row_table(measured([backward_row()], []))[0]
    numbers = accepted.empty()
    accepted.record(numbers, got)
    assert numbers["runs"][0]["peak_tflops"] == {"bf16": 2.0e-6} and numbers["rows"][0]["of_peak"] == 0.5
    rows = {(row["row"], row["shape"]): row for row in numbers["rows"]}
    page = readme.tables(rows, [scale_row(), backward_row()])[1]
    assert page[0] == "| op | shape | µs (efficiency, or rate) | of the peak | fastest peer, µs |"
    assert "| 0.50 |" in page[2] and "| - |" in page[3]


def test_a_run_with_fewer_peers_adds_its_share_of_the_peak() -> None:
    row = {"row": "mm", "shape": "9x9", "us": 10.0, "error_ours": 0.0, "peers": {"torch": 20.0, "liger": 12.0}}
    environment = {"gpu": "NVIDIA H200", "commit": "abc"}
    numbers = accepted.empty()
    accepted.record(numbers, {"environment": environment, "rows": [row], "host": None})
    later = {**row, "us": 8.0, "of_peak": 0.6, "peers": {"torch": 19.0}}
    result = {"environment": {**environment, "commit": "def"}, "rows": [later], "host": None}
    assert accepted.record(numbers, result) == []
    (kept,) = numbers["rows"]
    assert kept["us"] == 10.0 and kept["peers"] == row["peers"] and kept["of_peak"] == 0.48  # 0.6 in 8 us
    assert kept["peak_from"] == {"us": 8.0, "commit": "def"}
    assert accepted.record(numbers, result) == ["mm 9x9"]  # it has one now
    whole = {**later, "peers": row["peers"]}
    assert accepted.record(numbers, {**result, "rows": [whole]}) == [] and numbers["rows"][0]["us"] == 8.0
    assert "peak_from" not in numbers["rows"][0]


def test_a_layer_keeps_its_fastest_peer() -> None:
    def record(**ways: float) -> list[str]:
        row = {"hidden": 64, **{way: {"forward_and_backward_ms": ms} for way, ms in ways.items()}}
        return accepted.record(numbers, {"environment": {"date": ""}, "layers": {"layer_dense": {"rows": [row]}}})

    numbers = accepted.empty()
    assert record(ours=2.0, transformers=9.0, compile=4.0, liger=5.0) == []
    assert record(ours=1.0) == record(ours=1.0, transformers=9.0, liger=5.0) == ["layer_dense"]
    (row,) = numbers["layers"]["layer_dense"]["measured"]["rows"]
    assert row["ours"]["forward_and_backward_ms"] == 2.0
    assert record(ours=1.0, compile=4.5) == [] and record(ours=1.5, liger=4.25) == []


def test_a_peak_that_cannot_be_measured_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peak.try_measure(FakeTimer()) == {}
    assert cli.main(["peak"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peak, "measure", lambda timer: 1 / 0)
    assert "ZeroDivisionError" in peak.try_measure(FakeTimer())["error"]


# ---- compiling first, and continuing -------------------------------------------------------------------------------


def test_warm_calls_ours_and_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def broken(**inputs: Any) -> Any:
        raise RuntimeError("no such shape")

    def ours(x: Any, by: float) -> Any:
        called.append("ours")
        return x

    adapters = {"liger": broken, "quack": lambda x, by: lambda: called.append("quack")}
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", adapters)
    row = scale_row(ours=ours)
    assert warm.part([row], "0/1", bench_with(FakeTimer(), ["liger", "quack"]), [row], 60.0) == 0
    assert called == ["ours", "quack"]
    called.clear()
    assert warm.part([row], "1/2", bench_with(FakeTimer(), []), [row], 60.0) == 0 and not called
    assert warm.part([scale_row(make=lambda d, g: 1 / 0)], "0/1", bench_with(FakeTimer(), []), [row], 60.0) == 0
    args = cli.parser().parse_args(["run", "--rows", "a|b", "--peers", "none", "--missing", "--without-peak"])
    assert warm.options(args) == ["--rows=a|b", "--peers=none", "--missing", "--without-peak"]


def test_a_run_is_continued(tmp_path: Path) -> None:
    path, rows = tmp_path / "r.json", [scale_row(), backward_row()]

    def broken(**inputs: Any) -> Any:
        raise RuntimeError("upset")

    measured([rows[0], backward_row(ours=broken)], [], path=path)
    first = records.interrupted(path)
    assert "failed" in first["rows"][1]
    again = measured(rows, [], FakeTimer((1.0, 8.0, 50.0, 50.0, 8.0)), path=path, earlier=first)
    assert [row["row"] for row in again["rows"]] == ["scale_fwd", "scale_bwd"] and again["complete"]
    assert again["rows"][0] == first["rows"][0] and again["rows"][1]["us"] == 50.0
    assert meta.load(path) == again
    cut = measured(rows, [], path=path, ends=time.monotonic() - 1)
    assert cut["rows"] == [] and not cut["complete"] and meta.load(path) == cut
    assert records.interrupted(tmp_path / "none.json") is None
    cut["environment"]["source"] = "other"
    meta.save(cut, path)
    with pytest.raises(meta.ResultError, match="measured of source other"):
        records.interrupted(path)


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "_output", lambda *command: None)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    assert meta.environment()["commit"] == "0123abc"
    assert run.PEAK_BYTES
