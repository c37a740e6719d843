"""``bench sweep`` without a GPU: draws, statistics, continued files, peers that are missing or fail."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import __main__ as cli
from bench import meta, peers
from bench.measure.run import DeviceLost
from bench.measure.timing import Timer, Timing, TimingError
from bench.rows.row import Row
from bench.sweep import families, measure, sizes, statistics

# ---- draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_draws_follow_from_seed_family_and_index(family: str) -> None:
    first = [families.draw(family, 7, i).row.label for i in range(40)]
    assert first == [families.draw(family, 7, i).row.label for i in range(40)]
    assert first != [families.draw(family, 8, i).row.label for i in range(40)]
    assert len(set(first)) > 35  # hardly any twice
    for i in range(200):
        drawn = families.draw(family, 7, i)
        assert 0 < drawn.row.bytes < 8 << 30
        assert drawn.row.flops < 10e12
        assert (drawn.forward is not None) == drawn.row.name.endswith("_bwd")


def test_sizes_span_their_distributions() -> None:
    rng = random.Random(1)
    rows = [sizes.rows(rng) for _ in range(2000)]
    assert min(rows) == 1 and max(rows) > 15000
    assert 0.4 < sum(r <= 128 for r in rows) / len(rows) < 0.6  # as many below the geometric middle as above
    hidden = [sizes.hidden(rng) for _ in range(2000)]
    assert min(hidden) == 512 and 16000 < max(hidden) <= 16384 and all(h % 8 == 0 for h in hidden)
    assert 0.4 < sum(h % 16 != 0 for h in hidden) / len(hidden) < 0.6
    assert {sizes.head_size(rng) for _ in range(2000)} == set(range(32, 257, 8))
    heads = [sizes.heads(rng) for _ in range(4000)]
    assert {q for q, _ in heads} == set(range(1, 65)) and all(q % kv == 0 for q, kv in heads)
    assert len({q // kv for q, kv in heads}) > 40
    experts = [sizes.experts(rng) for _ in range(2000)]
    assert min(experts) == 8 and max(experts) == 384 and any(e % 2 for e in experts)
    vocabulary = [sizes.vocabulary(rng) for _ in range(4000)]
    assert min(vocabulary) < 1100 and max(vocabulary) > 250000 and any(v % 2 for v in vocabulary)
    batches = [sizes.sequences(rng) for _ in range(2000)]
    assert all(1 <= b * s <= 16384 for b, s in batches) and max(s for _, s in batches) > 15000
    assert sizes.rows(random.Random(3), 1 << 40) == 1


def test_families_have_what_they_are_for() -> None:
    def labels(family: str) -> str:
        return "\n".join(families.draw(family, 0, i).row.label for i in range(60))

    assert "_fast" in labels("mm_fp8_row") and "reduction_argmax" in labels("reduction")
    assert "glu_fwd" in labels("glu") and "glu_bwd" in labels("glu")
    assert all(name in labels("cross_entropy") for name in ("_fwd ", "_bwd ", "_fwdbwd "))
    assert "pages of" in labels("attention_decode") and "one sequence each" in labels("attention_decode")
    assert "causal" in labels("attention_bwd") and "full" in labels("attention_bwd")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_inputs_of_draws_fit_ours_and_torch(family: str) -> None:
    """Shapes agree with plain torch, without data: a draw must not fail because of how it is written."""
    from bench.measure.run import tensors

    for index in range(3):
        drawn = families.draw(family, 5, index)
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = drawn.row.make("cpu", torch.Generator())
            # Plain torch computes the gradients of attention head by head, which takes minutes here.
            plain = tensors(inputs)[1:4] if family == "attention_bwd" else tensors(drawn.row.torch(**inputs))
            wanted = [t.shape for t in plain]
            got = [t.shape for t in tensors(drawn.row.ours(**inputs))]
        assert wanted and got[: len(wanted)] == wanted, drawn.row.label


@pytest.mark.one_in(1000)
def test_rows_of_small_batches_of_experts_fit() -> None:
    for index in range(300):
        drawn = families.draw("moe_permute", 11, index)
        shape = drawn.row.shape
        tokens = int(shape.partition("x")[0])
        if tokens * int(shape.partition("x")[2].partition("e")[0]) < 1 << 19:
            inputs = drawn.row.make("cpu", torch.Generator().manual_seed(index))
            assert int(inputs["offsets"][-1]) <= len(inputs["slots"]), shape


def test_families_take_turns() -> None:
    assert list(measure.plan(["a", "b"], 2)) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


# ---- statistics ----------------------------------------------------------------------------------------------------


def _draw(index: int, us: float, family: str = "f", **times: Any) -> dict[str, Any]:
    return {"family": family, "index": index, "row": "r", "shape": f"{index}", "us": us, "peers": times, "error": 0.0}


def test_statistics() -> None:
    draws = [_draw(i, 10.0, torch=10.0 * (i + 1), liger={"absent": "no"}) for i in range(21)]
    draws += [_draw(21, 10.0, torch={"error": "bad"}), {"family": "f", "index": 22, "failed": "broken"}]
    draws.append({**_draw(23, 10.0, torch=20.0, liger=5.0), "error": 0.5})
    found = statistics.summary(draws)["f"]
    assert (found["count"], found["failed"], found["without_peer"], found["wrong"]) == (22, 1, 1, 1)
    assert found["minimum"] == 0.5 and found["worst"][0]["peer"] == "liger" and len(found["worst"]) == 10
    assert found["median"] == pytest.approx(10.5) and found["p5"] == pytest.approx(1.05)
    assert statistics.quantile([1.0, 2.0, 3.0], 0.25) == 1.5 and statistics.quantile([4.0], 0.05) == 4.0
    even = statistics.of_family([_draw(0, 10.0, torch=5.0), _draw(1, 10.0, torch=20.0)])
    assert even["geometric_mean"] == pytest.approx(1.0) and even["best_peers"] == {"torch": 2}
    assert statistics.absent_peers(draws)["liger"] == {"absent: no": 21}
    nothing = statistics.of_family([{"family": "f", "index": 0, "failed": "x"}])
    assert nothing["count"] == 0 and "minimum" not in nothing


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    file = measure.File(path, 3)
    file.add(_draw(0, 10.0, torch=5.0, quack={"absent": "ImportError: no quack"}))
    file.add({"family": "g", "index": 0, "row": "r", "shape": "1", "failed": "broken"})
    file.add({**_draw(0, 10.0, torch=5.0), "family": "h", "of_peak": 0.625})
    file.save()
    assert cli.main(["sweep", "--report", "--out", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Sweep of seed 3" in text and "Not all draws were measured" in text
    assert "| f | 1 | 0.50 | 0.50 | 0.50 | 0.50 | missed | 0 | 0 |" in text and "| g | 0 | - |" in text
    assert "- 0.50: r 0: 10.0 µs, torch 5.0 (draw 0)" in text
    assert "- 0.50: r 0: 10.0 µs, torch 5.0 (0.62 of the tensor cores' peak, draw 0)" in text
    assert "quack, 1 draws: absent: ImportError: no quack" in text and "g 0: r 1: broken" in text
    assert cli.main(["sweep", "--report", "--out", str(tmp_path / "none.json")]) == 2


# ---- measuring -----------------------------------------------------------------------------------------------------


class Device:
    def sync(self) -> None:
        pass


class FakeTimer(Timer):
    """10 µs for every call; one that returns None synchronises."""

    def __init__(self) -> None:
        self.device = Device()
        self.samples: list[int] = []

    def measure(self, calls: Any, iterations: int | None = None) -> Timing:
        self.samples.append(iterations)
        if calls[0]() is None:
            raise TimingError("does it synchronise?")
        return Timing((10.0,))

    def measure_waiting(self, calls: Any, iterations: int | None = None) -> Timing:
        return Timing((77.0,))


def _row(name: str = "scale_fwd", **changes: Any) -> Row:
    given = {
        "make": lambda device, g: {"x": torch.randn(4, 8, generator=g)},
        "ours": lambda x: x * 2,
        "torch": lambda x: x + x,
        "bytes": 1000,
    }
    return Row(name=name, shape="4x8", **{**given, **changes})


def _sweep(wanted: list[str], budget: measure.Budget | None = None, **options: Any) -> measure.Sweep:
    return measure.Sweep(FakeTimer(), "cpu", 1, wanted, budget or measure.Budget(10, 100.0), **options)


@pytest.fixture
def one_family(monkeypatch: pytest.MonkeyPatch) -> dict[str, families.Draw]:
    drawn = {"scale": families.Draw(_row())}
    table = {name: (lambda rng, name=name: drawn[name]) for name in ("scale", "other")}
    monkeypatch.setattr(families, "FAMILIES", table)
    drawn["other"] = families.Draw(_row(name="other_fwd"))
    return drawn


def test_peers_that_are_missing_or_fail(
    one_family: dict[str, families.Draw], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def uninstalled(x: Any) -> Any:
        import a_library_that_is_not_here  # noqa: F401

    def unsupported(x: Any) -> Any:
        raise peers.Absent("no such shape")

    def broken(x: Any) -> Any:
        raise RuntimeError("kernel is upset\nlong trace")

    adapters = {"liger": uninstalled, "quack": unsupported, "linghe": broken, "fa4": lambda x: lambda: None}
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", adapters)
    got = _sweep(["torch", "liger", "quack", "linghe", "fa4"]).measure("scale", 0)
    assert got["us"] == 10.0 and got["error"] < 1e-6 and got["row"] == "scale_fwd"
    assert got["peers"]["torch"] == 10.0 and got["peers"]["fa4"] == 77.0 and got["waiting"] == ["fa4"]
    assert "a_library_that_is_not_here" in got["peers"]["liger"]["absent"]
    assert got["peers"]["quack"] == {"absent": "Absent: no such shape"}
    assert got["peers"]["linghe"] == {"error": "RuntimeError: kernel is upset"}
    assert "inductor" not in got["peers"]
    assert statistics.ratio(got) == 1.0


def test_products_are_beside_the_peak(
    one_family: dict[str, families.Draw], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    row = _row(flops=2 * 10**9, make=lambda device, g: {"x": torch.randn(4, 8, generator=g).bfloat16()})
    one_family["scale"] = families.Draw(row)
    asked = []
    monkeypatch.setattr(measure.peak, "try_measure", lambda timer: asked.append(timer) or {"bf16": 800.0})
    sweep = _sweep(["torch"])
    draws = [sweep.measure(name, 0) for name in ("scale", "scale", "other")]
    assert draws[0]["of_peak"] == pytest.approx(0.25) and "of_peak" not in draws[2] and len(asked) == 1
    found = statistics.summary(draws)["scale"]
    assert found["worst"][0]["of_peak"] == pytest.approx(0.25)


def test_a_draw_that_fails_is_told(one_family: dict[str, families.Draw]) -> None:
    one_family["scale"] = families.Draw(_row(ours=lambda x: 1 / 0))
    assert _sweep(["torch"]).measure("scale", 0)["failed"].startswith("ZeroDivisionError")
    one_family["scale"] = families.Draw(_row(ours=lambda x: x * 3))
    assert _sweep(["torch"]).measure("scale", 0)["error"] == pytest.approx(0.5)
    one_family["scale"] = families.Draw(_row(ours=lambda x: x * float("nan")))
    assert _sweep(["torch"]).measure("scale", 0)["error"] == 1e9


def test_peers_that_compile_have_a_budget(
    one_family: dict[str, families.Draw], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", {"liger": lambda x: lambda: x * 2})
    budget = measure.Budget(2, 5.0)
    sweep = _sweep(["torch", "liger"], budget)
    assert sweep.measure("scale", 1)["peers"]["liger"] == 10.0
    assert "first 2 draws" in sweep.measure("scale", 2)["peers"]["liger"]["absent"]
    budget.spend("scale", "liger", 6.0)
    assert "more than 5 s" in sweep.measure("scale", 0)["peers"]["liger"]["absent"]
    budget.check("other", 0, "liger")
    budget.check("scale", 99, "torch_cudnn")


def test_long_calls_get_fewer_samples() -> None:
    assert measure.samples_of(families.Draw(_row())) == measure.SAMPLES
    assert measure.samples_of(families.Draw(_row(flops=10**13))) == measure.MIN_SAMPLES


def test_a_file_is_continued(one_family: dict[str, families.Draw], tmp_path: Path) -> None:
    path, lines = tmp_path / "s.json", []
    file = measure.File(path, 1)
    assert not measure.run(_sweep(["torch"]), file, ["scale", "other"], 2, time.monotonic() - 1, lines.append)
    assert measure.load(path)["draws"] == [] and not lines
    file.add(_draw(0, 3.0, family="scale", torch=6.0))
    file.save()
    again = measure.File(path, 1)
    assert measure.run(_sweep(["torch"]), again, ["scale", "other"], 2, time.monotonic() + 60, lines.append)
    result = measure.load(path)
    assert result["complete"] and len(lines) == 3
    assert [(d["family"], d["index"]) for d in result["draws"]] == [
        ("scale", 0), ("other", 0), ("scale", 1), ("other", 1),
    ]  # fmt: skip
    assert result["draws"][0]["us"] == 3.0 and result["families"]["scale"]["count"] == 2
    assert {"gpu", "commit", "date", "source"} <= set(result["environment"]) and result["seed"] == 1
    with pytest.raises(meta.ResultError, match="seed 1; expected 2"):
        measure.File(path, 2)
    result["environment"]["source"] = "other"
    meta.save(result, path)
    with pytest.raises(meta.ResultError, match="measured of source other"):
        measure.File(path, 1)
    path.write_text("{}")
    with pytest.raises(meta.ResultError, match="not the result of a sweep"):
        measure.File(path, 1)


def test_a_call_that_ends_the_process_is_left_out_by_the_next(
    one_family: dict[str, families.Draw], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.json"
    file = measure.File(path, 1)
    sweep = _sweep(["torch", "liger"], mark=file.mark)

    def fatal(x: Any) -> Any:
        def sync() -> None:
            raise RuntimeError("illegal memory access")

        sweep.timer.device.sync = sync
        raise RuntimeError("illegal memory access")

    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", {"liger": fatal})
    with pytest.raises(DeviceLost):
        measure.run(sweep, file, ["scale"], 1, time.monotonic() + 60, lambda text: None)
    marker = path.with_suffix(".json.running")
    assert marker.exists() and measure.load(path)["draws"] == []
    file = measure.File(path, 1, after_loss=True)
    assert not marker.exists() and file.fatal("scale", 0) == {"liger"}
    fresh = _sweep(["torch", "liger"], mark=file.mark)
    assert measure.run(fresh, file, ["scale"], 1, time.monotonic() + 60, lambda text: None)
    (done,) = measure.load(path)["draws"]
    assert done["peers"] == {"torch": 10.0, "liger": {"error": f"RuntimeError: {measure.FATAL}"}}
    file.result["fatal"] += [["scale", 5, "liger"], ["other", 1, "ours"], ["other", 2, "ours"]]
    assert file.fatal("scale", 9) == {"liger"}  # the second time in a family
    assert file.fatal("other", 3) == frozenset() and file.fatal("other", 1) == {"ours"}
    # Ours, the same.
    assert fresh.measure("scale", 0, frozenset({"ours"}))["failed"] == measure.FATAL
    # A process that was only cut off leaves no blame.
    measure.File(path, 1).mark("scale", 1, "ours")
    assert measure.File(path, 1).fatal("scale", 1) == frozenset()


def test_warm_calls_everything_once(one_family: dict[str, families.Draw], monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def ours(x: Any) -> Any:
        called.append("ours")
        raise RuntimeError("not yet compiled")

    one_family["scale"] = families.Draw(_row(ours=ours))
    adapters = {"liger": lambda x: lambda: called.append("liger"), "quack": lambda x: 1 / 0}
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", adapters)
    sweep = _sweep(["liger", "quack"])
    sweep.try_warm("scale", 0)
    assert called == ["ours", "liger"]
    one_family["scale"] = families.Draw(_row(make=lambda device, g: 1 / 0))
    sweep.try_warm("scale", 1)
