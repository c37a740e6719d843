"""``rtkernels tune``: what is measured, where choices are kept, and who uses them. Times are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rtkernels
from rtkernels import ArgumentError, emulator, explain, scaled_mm
from rtkernels.__main__ import main
from rtkernels.errors import RtkError, UnsupportedDeviceError
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.shared import tune as tuning
from rtkernels.ops.shared.backend import problem_key
from rtkernels.runtime.build import tuned as on_disk
from rtkernels.runtime.launch import tuned
from rtkernels.runtime.launch.device import device_info


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(tmp_path / "cache"))
    tuned.forget()
    yield
    monkeypatch.undo()
    tuned.forget()


def last_is_best(monkeypatch: pytest.MonkeyPatch, run: bool = False) -> None:
    def measure(runs, device) -> list[float]:
        for each in runs if run else ():
            each()
        return [10.0 + len(runs) - i for i in range(len(runs))]

    monkeypatch.setattr(tuning, "measure", measure)


def operands(m: int = 5, n: int = 40, k: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))


def tune(problems) -> list[tuning.Tuned]:
    with emulator.recording():
        return rtkernels.tune(problems, device=-1)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_candidate_can_be_run(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    last_is_best(monkeypatch, run=True)
    a, b = operands()
    codes, scale = rtkernels.quantize_fp8(torch.randn(40, 256).bfloat16(), granularity="row")
    offs = torch.tensor([16, 40], dtype=torch.int32)
    with rtkernels.emulate(target):
        with rtkernels.record_problems() as problems:
            before = scaled_mm(a, b)
            scaled_mm(a, b)  # seen once
            scaled_mm(a, b, backend="mma")  # the caller has chosen
            rtkernels.gated_mm(a, b)
            rtkernels.grouped_mm(operands(40)[0], torch.stack([b, b]), offs=offs)
            rtkernels.grouped_mm_masked(torch.stack([a, a]), torch.stack([b, b]), masked_m=offs.clamp(max=5))
            rtkernels.grouped_wgrad(operands(40)[0], operands(40)[0], offs=offs)
            scaled_mm(codes, codes, scale, scale, quant_out="1x128")
            scaled_mm(a, torch.randint(0, 255, (40, 32), dtype=torch.uint8), packed=(None, "e2m1"))
        assert len(problems) == 7
        results = tune(problems)
        for problem, result in zip(problems, results, strict=True):
            choice = PRODUCTS.choose(problem, device_info(-1))
            assert (choice.backend.name, choice.options) == (result.backend, result.options)
            assert result.us <= result.default_us and len(result.measured) >= 1
            assert result.title in str(result)
        assert torch.equal(before, scaled_mm(a, b)) or torch.allclose(
            before.float(), scaled_mm(a, b).float(), 1e-2, 1e-2
        )


def test_plans_are_made_again_and_levels_ignore_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    last_is_best(monkeypatch)
    a, b = operands()
    with rtkernels.emulate("sm_90"):
        scaled_mm(a, b)
        told = explain(scaled_mm, a, b, target="9.0")  # a GPU of another name
        problem = told.problem
        plans = scaled_mm_plans()
        assert plans
        tune(told)
        assert not scaled_mm_plans()  # forgotten with the table that they were made with
        info = device_info(-1)
        assert PRODUCTS.choose(problem, info).options is not None
        assert explain(scaled_mm, a, b, target="9.0") == told
        with rtkernels.batch_invariant(1):
            assert PRODUCTS.choose(problem, info).options is None
        assert PRODUCTS.choose(problem, info, "mma").options is None  # by name
        assert PRODUCTS.choose(problem._replace(m=6), info).options is None
        monkeypatch.setattr(tuned, "source", lambda *_: "other kernels")
        assert PRODUCTS.choose(problem, info).options is None


def scaled_mm_plans() -> int:
    from rtkernels.runtime.launch.plans import Plans

    return sum(map(len, Plans._all))


def test_a_choice_must_be_a_candidate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    last_is_best(monkeypatch)
    with rtkernels.emulate("sm_90"):
        problem = explain(scaled_mm, *operands()).problem
        tune(problem)
        info = device_info(-1)
        (path,) = (Path(rtkernels.cache.path()) / "v2" / "tuned").glob("*.json")
        content = json.loads(path.read_text())
        ((source, families),) = content["choices"].items()
        (choice,) = families["product"].values()
        for wrong in ({"options": {"tile": [2, 1, 8, 3, 4], "sharing": 0, "grid": 0}}, {"backend": "cutlass"}):
            families["product"][problem_key(problem)] = choice | wrong
            path.write_text(json.dumps(content))
            tuned.forget()
            assert PRODUCTS.choose(problem, info).options is None
        for text in ("{", "[]", '{"format": 9}', json.dumps(content | {"choices": {source: {"product": {"x": 3}}}})):
            path.write_text(text)
            tuned.forget()
            assert PRODUCTS.choose(problem, info).options is None
            assert on_disk.gpus() == []
        assert "measured choices in" in caplog.text


def test_small_gains_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", lambda runs, device: [10.0, *(9.9 for _ in runs[1:])])
    with rtkernels.emulate("sm_90"):
        (result,) = tune([explain(scaled_mm, *operands())])
    assert (result.backend, result.options) == result.default and "as before" in str(result)


def test_warm_ships_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    last_is_best(monkeypatch)
    with rtkernels.emulate("sm_90"):
        problem = explain(scaled_mm, *operands()).problem
        tune(problem)
        store = on_disk.places.named_store(tmp_path / "shipped")
        assert on_disk.ship(store) == 1
        assert on_disk.clear() == 1
        tuned.forget()
        assert PRODUCTS.choose(problem, device_info(-1)).options is None
        monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(tmp_path / "shipped"))
        tuned.forget()
        assert PRODUCTS.choose(problem, device_info(-1)).options is not None
        assert not list(rtkernels.cache.ls())  # a table is no entry


@pytest.mark.one_in(1000)
def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    monkeypatch.setattr(rtkernels, "tune", lambda problems, progress: seen.extend(problems))
    assert main(["tune", "scaled_mm", "16x4096x4096", "5x64x32", "--dtype", "fp8"]) == 0
    assert [(p.m, p.n, p.k, p.a.token, p.scale_b.rows) for p in seen] == [
        (16, 4096, 4096, "e4m3", 1), (5, 64, 32, "e4m3", 1),
    ]  # fmt: skip
    assert main(["tune", "gated_mm", "16x512x256"]) == 0 and seen[-1].gate == "silu" and seen[-1].n == 512
    assert main(["tune", "grouped_mm", "64x512x256", "--groups", "4", "--dtype", "fp8",
                 "--recipe", "block_1x128_128x128"]) == 0  # fmt: skip
    assert seen[-1].groups.count == 4 and seen[-1].scale_b.rows == 128
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, rtkernels\nassert sys.argv[1:] == ['--steps', '3']\n"
        "with rtkernels.emulate('sm_90'):\n    rtkernels.scaled_mm(*torch.ones(2, 8, 64).bfloat16())\n"
    )
    assert main(["tune", "--script", str(program), "--steps", "3"]) == 0 and seen[-1].m == 8
    assert main(["tune", "--list"]) == 0 and main(["tune", "--clear"]) == 0
    capsys.readouterr()
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    for words, told in (
        (["scaled_mn", "1x2x3"], "function is 'scaled_mn'; expected one of scaled_mm"),
        (["scaled_mm", "1x2"], "size '1x2' is not MxNxK"),
        (["scaled_mm"], "sizes are missing"),
        (["scaled_mm", "8x8x8", "--dtype", "fp9"], "--dtype is 'fp9'"),
        (["scaled_mm", "8x8x8", "--recipe", "row"], "--recipe is 'row' for bf16"),
        (["scaled_mm", "8x8x8", "--groups", "3"], "--groups goes with grouped_mm"),
        (["--script"], "--script is empty"),
        (["--script", "nothing.py"], "--script is 'nothing.py'"),
        (["--script", str(tmp_path / "empty.py")], "computed no product"),
        (["--script", str(tmp_path / "ends.py")], "ended with 3"),
    ):
        assert main(["tune", *words]) == 2
        assert told in capsys.readouterr().err


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="problems has 3"):
        rtkernels.tune(3)
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ArgumentError, match="for a matrix product"):
        rtkernels.tune([explain(rtkernels.attention, q, q, q)])
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDeviceError, match="there is no GPU"):
            rtkernels.tune(explain(scaled_mm, *operands()))
    with rtkernels.record_problems(), pytest.raises(ArgumentError, match="recorded already"):
        with rtkernels.record_problems():
            pass
    monkeypatch.setenv("RTKERNELS_CACHE", "off")
    with rtkernels.emulate("sm_90"), pytest.raises(RtkError, match="cache directory that can be written"):
        rtkernels.tune(explain(scaled_mm, *operands()), device=-1)
