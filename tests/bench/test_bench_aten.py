"""Benchmark cases of torch's operators: every row of the table has one, and its arguments fit the schema."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from bench.__main__ import main
from bench.measure import aten, aten_file, aten_run
from bench.measure.aten_peers import Worker
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


def test_the_comprehensive_level(tmp_path, capsys) -> None:
    def shapes(pattern: str, level: str) -> set[tuple[int, ...]]:
        return {shape for _, shape, _ in aten.cases(pattern, None, level)}

    assert shapes("^ew abs$", "comprehensive") - shapes("^ew abs$", "core") == {
        (1024, 1), (1024, 16), (1024, 256), (1024, 4096), (1024, 65536), (64, 64, 1), (64, 64, 16), (64, 64, 256),
        (64, 64, 4096),
    }  # fmt: skip
    assert {(1024, 1 << 20), (1025 * 1024,), (64, 4096, 64)} <= shapes("^red amax$", "comprehensive")
    assert (16, 16, 4098) in shapes("^row _softmax$", "comprehensive") - shapes("^row _softmax$", "core")
    assert max(shape[0] for shape in shapes("^scan cumsum$", "comprehensive")) == 10000
    found = {**_file("comprehensive"), "cases": []}
    (tmp_path / "all.json").write_text(json.dumps(found), encoding="utf-8")
    assert main(["aten", "--record", str(tmp_path / "all.json")]) == 2
    assert "has level comprehensive; the default set follows from core" in capsys.readouterr().err
    quick = list(aten.quick_cases(level="comprehensive"))
    assert {row.name for row, *_ in quick} <= set(measured.DEFAULT) and len(quick) == len(set(quick)) < 800
    assert {dtype for *_, dtype in quick} == {torch.bfloat16} and not set(quick) & set(aten.cases())


def _file(level: str) -> dict:
    return {"environment": {}, "quick": False, "level": level, "complete": True, "host": {}, "bounds": {}}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("group", sorted(aten.MORE_SHAPES))
def test_arguments_fit_at_the_smallest_comprehensive_shape(group: str) -> None:
    """Rows of one element, planes of one row: torch takes every case that is not refused for its dimensions."""
    if not aten.MORE_SHAPES[group]:
        return
    smallest = min(aten.MORE_SHAPES[group], key=math.prod)
    asked = {row.name: row for row, shape, _ in aten.cases(level="comprehensive") if shape == smallest}
    assert group == "norm" or len(asked) > 10
    for row in asked.values():
        given = aten.arguments(row, smallest, torch.float32, "cpu")
        if given is None or row.name.startswith("_fused_rms_norm"):  # the latter on CUDA alone
            continue
        aten.operator_of(row)(*given[0], **given[1])


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
    assert {name: size for name, (_, size) in measured.DEFAULT.items()} == chosen.default_set(result)
    assert chosen.MEASURED.read_text(encoding="utf-8") == chosen.measured_module(result)
    assert set(measured.DEFAULT) <= set(table.table()) | {"_fused_rms_norm", "_fused_rms_norm_backward"}


def test_a_threshold_leaves_small_calls_to_torch() -> None:
    def case(n: int, torchs: float, ours: float) -> dict:
        times = {"torch": {"operator": torchs, "submit": 5.0}, "rtkernels": {"operator": ours, "submit": 9.0}}
        return {"overload": "sum", "family": "red", "shape": [n], "dtype": "float32", **times}

    host = {"torch sum": 5.0, "given back sum": 6.0}
    result = {"host": host, "cases": [case(100, 5.0, 20.0), case(1 << 20, 20.0, 20.0), case(1 << 24, 90.0, 45.0)]}
    alone, best, size = chosen.choice(result)["sum"]
    assert size == 1 << 20 and alone < best and abs(best - (5 / 6 * 1 * 2) ** (1 / 3)) < 1e-9
    assert chosen.default_set(result) == {"sum": 1 << 20}
    half = {"host": host, "cases": [case(100, 50.0, 5.0), case(1 << 20, 20.0, 41.0), case(1 << 24, 900.0, 45.0)]}
    assert chosen.default_set(half) == {"sum": 1 << 24}  # no case at half of torch's speed, whatever the mean says
    plain = {"host": host, "cases": [c | {"overload": "abs", "family": "ew"} for c in result["cases"]]}
    assert chosen.choice(plain)["abs"] == chosen.choice(result)["sum"] and not chosen.default_set(plain)


# Answers as the process of the peers does, but dies at `floor`, and says nothing at `ceil`.
_PEERS = """
import json, os, sys, time
for line in sys.stdin:
    name, shape, dtype, ways, quick = json.loads(line)
    if name == "floor": os._exit(7)
    if name == "ceil": time.sleep(60)
    times = {way: {"operator": 12.0} for way in ways} | {"torch": {"operator": 4.0}}
    print(json.dumps({"found": times, "goes_on": name != "abs"}), flush=True)
    if name == "abs": os._exit(1)
"""


_PEERS_HAVE = ("abs", "floor", "ceil", "exp", "sin")


def _run_with_peers(peers: str, out, monkeypatch, cases=None) -> dict:
    """Measure some operators of one size, with invented times, and `peers` as the other process."""
    ours = {"torch": {"operator": 6.0}, "rtkernels": {"operator": 3.0, "why": {}}}
    monkeypatch.setattr(aten, "measure_case", lambda *args: ours)
    errors = {(name, (64, 64), "bfloat16"): "bad" if name == "exp" else "" for name in _PEERS_HAVE}
    monkeypatch.setattr(aten_run, "warm", lambda cases: None)
    monkeypatch.setattr(aten_run.aten_flaggems, "compile_cases", lambda cases, seconds: errors)
    monkeypatch.setattr(aten_run, "Worker", lambda: Worker((sys.executable, "-S", "-c", peers), seconds=2.0))
    monkeypatch.setattr(aten, "_QUICK_OTHERS", [(64, 64)])
    result = {"cases": cases or []}
    pattern = f"^ew ({'|'.join(_PEERS_HAVE)}|cos)$"
    asked = aten_run._Run(pattern, out, aten.WAYS[:3], None, True, True, None, 0.0)
    aten_run._measure_cases(asked, result, None)
    return result


def test_our_times_are_there_when_a_peer_ends_its_process(tmp_path, monkeypatch) -> None:
    out = tmp_path / "aten.json"
    result = _run_with_peers(_PEERS, out, monkeypatch)
    found = {case["overload"]: case for case in result["cases"]}
    assert result["complete"] and found.keys() == {*_PEERS_HAVE, "cos"} and "flaggems" not in found["cos"]
    assert all(case["rtkernels"]["operator"] == 3.0 for case in found.values())
    assert found["floor"]["flaggems"] == {"error": "its process ended, status 7"}
    assert "no answer in 2 s" in found["ceil"]["flaggems"]["error"]
    assert found["exp"]["flaggems"] == {"error": "bad"}
    for name in ("abs", "sin"):  # each in units of torch's time in its process: 3 over 0.5
        assert found[name]["flaggems"] == {"operator": 12.0, "torch": {"operator": 4.0}}
    assert "2 overloads, mean 6.00; 0 below 1" in aten_file.against_flaggems(result["cases"])
    aten_file.save({"complete": False, "cases": []}, out)
    aten_file.append(found["floor"], out)  # finished before the process of ours was ended
    resumed = _run_with_peers(_PEERS.replace("12.0", "13.0"), out, monkeypatch, aten_file.load(out)["cases"])
    found = {case["overload"]: case for case in resumed["cases"]}
    assert "error" in found["floor"]["flaggems"] and found["sin"]["flaggems"]["operator"] == 13.0


def test_peers_that_never_answer_are_given_up(tmp_path, monkeypatch) -> None:
    result = _run_with_peers("raise SystemExit(3)", tmp_path / "aten.json", monkeypatch)
    assert not result["complete"] and all("rtkernels" in case for case in result["cases"])
    assert 3 <= sum("flaggems" in case for case in result["cases"]) <= 4  # three starts, and what failed before
