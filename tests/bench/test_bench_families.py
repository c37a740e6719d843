"""`python -m bench e2e families`: all arms of a family in one process, their gates, and the table of the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.e2e import families, gates, processes, record
from bench.e2e.arms import FAMILIES
from bench.report import models_page

SMALL = "--tiny --vocab 300 --tokens 32 --seq 16 --layers 1 --runs 2 --steps 2".split()


def arm(ms: float, mib: int, loss: float = 6.0) -> dict[str, Any]:
    return {"step_ms": ms, "peak_mib": mib, "tokens_per_s": 1, "losses": [loss]}


ARMS = {
    "hf": arm(9, 9000), "compile": arm(5, 8000), "liger": arm(6, 4000), "ours": arm(5.2, 4100),
    "ours_fused": arm(4, 4200), "fp8": arm(3.5, 4000, 6.1),
}  # fmt: skip


def test_gates_of_a_family() -> None:
    found = {gate["gate"]: gate for gate in gates.gates("olmo2_like", ARMS)}
    missed = {name for name, gate in found.items() if not gate["passed"]}
    assert missed == {"time, ours : compile", "peak memory, ours_fused : liger", "first loss, fp8 : hf"}
    assert found["time, ours_fused : ours"]["value"] == 0.7692 and len(found) == 11
    assert gates.gates("olmo2_like", {"ours": arm(1, 1), "liger": {"absent": ""}}) == []


def test_processes() -> None:
    args = families.parser().parse_args(["--out", "x", "--models", "llama_like,gpt_oss_like"])
    assert [more[0] for more in families._commands(args)] == ["--one=llama_like", "--one=gpt_oss_like"]
    args.warm = True
    warmed = families._commands(args)
    assert len(warmed) == 6 and warmed[0] == ["--one=llama_like", "--arms=compile"]
    assert warmed[2] == ["--one=llama_like", "--arms=ours,ours_fused,fp8"]
    with pytest.raises(SystemExit):
        families.main(["--out", "x", "--models", "nothing_like"])
    assert set(args.models.split(",")) <= set(FAMILIES)


@pytest.mark.one_in(1000)
def test_arms_of_a_family_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    options = [*SMALL, "--out", str(tmp_path), "--one", "llama_like", "--arms", "hf,ours"]
    assert families.main(options) == 0
    result = json.loads((tmp_path / "train-llama_like.json").read_text())
    assert len(result["arms"]["ours"]["runs_ms"]) == 2 and len(result["arms"]["hf"]["runs_ms"]) == 1
    assert result["arms"]["ours"]["losses"][:3] == pytest.approx(result["arms"]["hf"]["losses"], rel=1e-2)
    assert {gate["gate"] for gate in result["gates"]} == {"first loss, ours : hf"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("llama_like       ours") and " runs " in lines[1]
    accepted = tmp_path / "h200.json"
    assert record.main([str(tmp_path / "train-llama_like.json"), "--to", str(accepted)]) == 0
    assert "train llama_like, 1 layers" in json.loads(accepted.read_text())["results"]
    assert families.main([*options[:-1], "ours", "--warm"]) == 0 and "ran" in capsys.readouterr().out


def test_nobody_waits_for_a_process_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(processes.LOCK, str(tmp_path / "lock"))
    monkeypatch.setattr(processes, "PATIENCE", 0.05)
    with processes.alone():
        with processes.sharing():
            pass
    assert "not free for 0.05 s" in capsys.readouterr().err
    with processes.sharing(), processes.sharing():
        pass
    assert not capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), processes.limited(processes.alone(), 60.0):
        raise ZeroDivisionError  # and no process ends a minute later


def test_arms_behind_one_that_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends without a result is followed by one for the arms that are left."""
    given: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            given.append(command[3:])
            self.returncode = 1 if len(given) == 1 else 0

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(families.subprocess, "Popen", Process)
    assert families.main(["--out", str(tmp_path), "--models", "llama_like", "--arms", "hf,ours"]) == 0
    assert len(given) == 2 and given[1] == [*given[0], "--continue"]
    given.clear()
    assert families.main(["--out", str(tmp_path), "--models", "llama_like", "--warm"]) == 0 and len(given) == 3


def test_table_of_the_docs() -> None:
    environment = {"gpu": "H200", "torch": "2", "peers": {"liger": "0.8"}, "date": "2026-11-18T00"}
    head = {
        "kind": "train",
        "model": "olmo2_like",
        "layers": 4,
        "tokens": 8192,
        "seq": 2048,
        "environment": environment,
    }
    result = {**head, "arms": {**ARMS, "compile": {"failed": "x"}}, "gates": gates.gates("olmo2_like", ARMS)}
    policy = {"rows": {}, "autotune": "", "gpu": "", "torch": "", "date": ""}
    page = models_page.page({"results": {"train olmo2_like, 4 layers": result}}, policy)
    row = "| olmo2_like, 4 layers | 9.0 / 8.8 | 6.0 / 3.9 | - | 5.2 / 4.0 | 4.0 / 4.1 | 3.5 / 3.9 |"
    assert row in page and "* olmo2_like, 4 layers: time, ours : compile 1.04, limit 1" in page
    assert "### olmo2_like" not in page
