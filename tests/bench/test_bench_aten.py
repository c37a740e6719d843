"""Benchmark cases of torch's operators: every row of the table has one, and its arguments fit the schema."""

from __future__ import annotations

import torch

from bench.__main__ import main
from bench.measure import aten, aten_file
from bench.report import aten as chosen
from rtkernels.aten import measured, table


def test_arguments_fit_the_schemas() -> None:
    without = []
    for row in table.table().values():
        given = aten.arguments(row, (8, 8), torch.float32, "cpu")
        if given is None:
            without.append(row.name)
            continue
        base, _, overload = row.name.partition(".")
        call = getattr(getattr(torch.ops.aten, base), overload or "default")
        if row.name == "_fused_rms_norm_backward":  # CUDA's alone, here its shapes
            given = aten.arguments(row, (8, 8), torch.float32, "meta")
        call(*given[0], **given[1])
    assert {name for name in without if "out" not in name} <= {"diagonal_backward"}


def test_cases_and_summary(capsys) -> None:
    names = {row.name for row, _, _ in aten.cases("^ew add")}
    assert {"add.Tensor", "addcmul"} <= names
    assert all(len(shape) == 2 for row, shape, _ in aten.cases("^copy cat"))
    times = {"torch": {"operator": 4.0}, "rtkernels": {"operator": 2.0}, "inductor": {"error": "no"}}
    found = [{"overload": "cat", "family": "copy", "shape": (2, 2), "dtype": "float32", **times}] * 2
    assert "| cat | 2.00 | 2.00 |  |  | 2x2f 2.00, 2x2f 2.00 |" in aten_file.summary(found)
    assert main(["aten", "--ways", "nobody"]) == 2
    assert "unknown ways nobody" in capsys.readouterr().err


def test_a_file_grows_case_by_case(tmp_path) -> None:
    out = tmp_path / "aten.json"
    assert aten_file.load(out) is None
    case = {"overload": "cat", "family": "copy", "shape": [2, 2], "dtype": "float32", "torch": {"operator": 4.0}}
    aten_file.save({"complete": False, "cases": [case]}, out)
    aten_file.append({**case, "rtkernels": {"operator": 2.0, "why": {}}, "flaggems": {"operator": 3.0}}, out)
    aten_file.append({**case, "dtype": "bfloat16"}, out)
    found = aten_file.load(out)["cases"]
    assert [c["dtype"] for c in found] == ["float32", "bfloat16"] and found[0]["rtkernels"]["operator"] == 2.0
    assert "1 overloads, mean 1.50; 0 below 1" in aten_file.against_flaggems(found)
    aten_file.save({"complete": True, "cases": found}, out)
    assert aten_file.load(out)["cases"] == found and len(list(tmp_path.iterdir())) == 1


def test_the_default_set_follows_from_the_record() -> None:
    result = chosen.load()
    assert measured.DEFAULT == chosen.default_set(result)
    assert chosen.MEASURED.read_text(encoding="utf-8") == chosen.measured_module(result)
    assert set(measured.DEFAULT) <= set(table.table()) | {"_fused_rms_norm", "_fused_rms_norm_backward"}


def test_a_threshold_leaves_small_calls_to_torch() -> None:
    def case(n: int, torchs: float, ours: float) -> dict:
        times = {"torch": {"operator": torchs, "submit": 5.0}, "rtkernels": {"operator": ours, "submit": 9.0}}
        return {"overload": "sum", "shape": [n], "dtype": "float32", **times}

    host = {"torch sum": 5.0, "given back sum": 6.0}
    result = {"host": host, "cases": [case(100, 5.0, 20.0), case(1 << 20, 20.0, 20.0), case(1 << 24, 90.0, 45.0)]}
    alone, best, size = chosen.choice(result)["sum"]
    assert size == 1 << 20 and alone < best and abs(best - (5 / 6 * 1 * 2) ** (1 / 3)) < 1e-9
    assert chosen.default_set(result) == {"sum": 1 << 20}
