"""`python -m bench e2e --tiny`: the arms run on a CPU, decode the same tokens, and give records that can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.e2e import gates, infer, parity, plot, split, train
from bench.e2e import record as recording
from bench.e2e.text import corpus_of
from rtkernels.models import fp8
from rtkernels.nn import fp8_experts

pytest.importorskip("transformers", minversion="5.0")

INFER = "--tiny --vocab 200 --prompt 12 --new 4 --prefill 1,2 --decode 1 --repeats 1".split()
TRAIN = "--tiny --vocab 500 --tokens 64 --seq 32 --steps 2 --warmup 1".split()
COMPILED = pytest.mark.slow


def inferred(arm: str) -> dict[str, Any]:
    return infer.run_arm(arm, infer.parser().parse_args(INFER))


def trained(arm: str, model: str = "dense") -> dict[str, Any]:
    return train.run_arm(arm, train.parser().parse_args([*TRAIN, "--model", model]))


@pytest.mark.one_in(1000)
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


@pytest.mark.one_in(1000)
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


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a word, and a word\n" * 50)
    for more, kinds in ((["--bytes"], 256), ([], 6)):  # "a", " ", "word", ",", "and", the end of a line
        args = train.parser().parse_args(["--text", str(tmp_path / "text"), "--vocab", "9", *more])
        corpus = corpus_of(args)
        assert corpus.kinds == kinds and args.vocab == (256 if more else 9)
        assert int(corpus.train.max()) < args.vocab and corpus.batch(0, 8, 4).shape == (2, 4)


def test_rounds_of_an_arm() -> None:
    first, second = {"step_ms": 2.0, "mfu": 0.5}, {"step_ms": 1.0, "mfu": 1.0}
    assert train._merged(None, first) is first and train._merged(first, {"failed": ""}) is first
    assert train._merged(first, second) == {"step_ms": 1.0, "mfu": 1.0, "rounds_ms": [2.0, 1.0]}
    assert train._merged(train._merged(first, second), first)["rounds_ms"] == [2.0, 1.0, 2.0]


def test_where_a_step_goes() -> None:
    ours = "void rtk::gemm_sm90<>", "void rtk::attention_sm90_bwd<>", "void rtk::glu_bwd<>"
    found = split.split((name, 500.0) for name in (*ours, "nvjet_sm90_tst", "add"))
    assert found == {"launches": 5, "ms": {"gemm": 1.0, "attention": 0.5, "ours": 0.5, "other": 0.5}}


def test_gates_of_training() -> None:
    hf = {"tokens_per_s": 100, "peak_mib": 1000, "losses": [3.0] * 10, "first_step_s": 9.0}
    ours = {"tokens_per_s": 160, "peak_mib": 600, "losses": [3.02] + [3.0] * 9, "first_step_s": 10.0}
    ours["first_step_itself_s"] = 3.0
    found = {
        g["gate"]: g["passed"] for g in gates.gates("dense", {"hf": hf, "ours_fused": ours, "liger": {"absent": ""}})
    }
    assert found == {
        "tokens/s, ours_fused : hf": True, "peak memory, ours_fused : hf": False, "first loss, ours_fused : hf": False,
        "first step, ours_fused, warm, s": False, "first step, ours_fused - hf, s": True,
    }  # fmt: skip
    cold = gates.gates("dense", {"ours_fused": ours}, cold=True)
    assert cold == [{"gate": "first step, ours_fused, cold, s", "value": 3.0, "must": 15.0, "passed": True}]
    assert "MISSED: peak memory, ours_fused : hf: 0.6 (must 0.5)" in gates.text(
        gates.gates("dense", {"hf": hf, "ours_fused": ours})
    )


PARITY = "--tiny --vocab 500 --tokens 64 --seq 32 --steps 2 --seeds 2".split()


@pytest.mark.one_in(3)
def test_arms_of_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    from rtkernels.models import fp8_products
    from rtkernels.ops.gemm import fp8_linear

    monkeypatch.setattr(fp8, "_SMALLEST_GAIN", 0)
    args = parity.parser().parse_args(PARITY)
    arms = {arm: parity.run_arm(arm, args) for arm in ("hf", "hf_perturbed", "ours_fused", "fp8")}
    # What the arm with a mistake changes for its process.
    monkeypatch.setattr(fp8_linear, "scaled_mm", fp8_linear.scaled_mm)
    monkeypatch.setattr(fp8_products, "multiply", fp8_products.multiply)
    for name in ("_product", "_weight_gradient"):
        monkeypatch.setattr(fp8_experts, name, getattr(fp8_experts, name))
    arms["fp8_saturated"] = parity.run_arm("fp8_saturated", args)
    found = {gate["gate"]: gate["passed"] for gate in gates.parity_gates(arms)}
    assert not found.pop("loss, hf, last : first")  # in two steps
    assert len(found) == 6 and all(found.values()), gates.text(gates.parity_gates(arms))
    first, second = arms["fp8"]["runs"]
    assert first["losses"][0] != second["losses"][0] and len(first["gradients"]) == 2
    assert "of ours_fused where that is more)" in gates.text(gates.parity_gates(arms))
    assert arms["hf"]["runs"][0]["losses"] != arms["hf_perturbed"]["runs"][0]["losses"]
    worst = min(g["cosine"] for g in arms["fp8_saturated"]["runs"][0]["gradients"])
    assert worst < min(g["cosine"] for run in arms["fp8"]["runs"] for g in run["gradients"])


def test_gates_of_parity() -> None:
    def run(last: float, held_out: float, cosine: float = 0.99, norm: float = 1.0) -> dict[str, Any]:
        gradients = [{"step": 0, "cosine": cosine, "norm": norm}]
        return {"losses": [10.0] * 8 + [last] * 2, "held_out": held_out, "gradients": gradients, "seed": 0}

    arms = {
        "hf": {"runs": [run(4.0, 5.0)]}, "hf_perturbed": {"runs": [run(4.04, 5.0)]},
        "ours_fused": {"runs": [run(4.06, 5.0), run(4.0, 5.02)]}, "fp8": {"runs": [run(4.0, 5.03), run(4.0, 5.0)]},
        "fp8_saturated": {"runs": [run(4.0, 5.01)]},
    }  # fmt: skip
    assert [gate["passed"] for gate in gates.parity_gates(arms)] == [True] * 6 + [False]
    arms |= {
        "hf_perturbed": {"runs": [run(4.01, 5.0)]}, "fp8": {"runs": [run(4.0, 5.1, 0.9, 1.1), run(4.0, 5.0)]},
        "fp8_saturated": {"runs": [run(4.0, 5.03)]}, "liger": {"absent": ""},
    }  # fmt: skip
    assert [gate["passed"] for gate in gates.parity_gates(arms)] == [True] + [False] * 5 + [True]


def test_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, file = tmp_path / "h200.json", tmp_path / "result.json"
    for more in ({}, {"layers": 4}, {"cold": True, "layers": None}):
        file.write_text(json.dumps({"kind": "train", "model": "dense", "arms": {"hf": {"step_ms": 1}}, **more}))
        assert recording.main([str(file), "--to", str(kept)]) == 0
    names = ["train dense", "train dense, 4 layers", "train dense, cold"]
    assert list(json.loads(kept.read_text())["results"]) == names
    other = tmp_path / "other.json"
    other.write_text(
        json.dumps({"kind": "train", "model": "dense", "arms": {"ours": {}, "fp8": {"failed": "x"}}, **more})
    )
    assert recording.main([str(file), str(other), "--to", str(kept)]) == 0 and "fp8 failed" in capsys.readouterr().err
    assert list(json.loads(kept.read_text())["results"]["train dense, cold"]["arms"]) == ["hf", "ours"]
    file.write_text(json.dumps({"kind": "infer", "model": "moe", "arms": {"hf": {"failed": "out of memory"}}}))
    assert recording.main([str(file), "--to", str(kept)]) == 2 and "hf failed" in capsys.readouterr().err


def test_a_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked, row = tmp_path / "train.json", [], {"absent": "x"}
    monkeypatch.setattr(
        train.processes, "records", lambda _, arms, *args: asked.append(arms) or [(a, row) for a in arms]
    )
    command = [*TRAIN, "--out", str(out), "--arms"]
    train.main([*command, "hf,liger"])
    result = json.loads(out.read_text())
    result["arms"]["liger"] = {"failed": "x"}
    out.write_text(json.dumps(result))
    train.main([*command, "hf,liger,ours", "--continue"])
    assert asked == [["hf", "liger"], ["liger", "ours"]]
    assert list(json.loads(out.read_text())["arms"]) == ["hf", "liger", "ours"]
    with pytest.raises(SystemExit, match="of another command"):
        train.main([*command, "hf", "--continue", "--model", "moe"])
    train.main([*command, "hf"])
    assert list(json.loads(out.read_text())["arms"]) == ["hf"]


def test_a_file_of_other_sources_is_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names one commit for all that it holds."""
    from bench import layers
    from bench.e2e import decode_rows, families

    content = {"kind": "train", "model": "dense", "environment": {"source": "other"}}
    content |= {"rows": {}, "arms": {}, "layers": {}}
    out = tmp_path / "out.json"
    out.write_text(json.dumps(content))
    (tmp_path / "train-llama_like.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="measured of source other"):
        train.processes.begun(out, True, {"kind": "train"})
    with pytest.raises(SystemExit, match="measured of source other"):
        layers.main(["--tiny", "--continue", "--out", str(out)])
    with pytest.raises(SystemExit, match="measured of source other"):
        decode_rows.main(["--tiny", "--continue", "--out", str(out)])
    with pytest.raises(SystemExit, match="measured of source other"):
        families.main(["--tiny", "--continue", "--one", "llama_like", "--arms", "hf", "--out", str(tmp_path)])
    other = tmp_path / "other.json"
    for path, source in ((out, "other"), (other, "these")):
        path.write_text(json.dumps({**content, "arms": {source: {"step_ms": 1}}, "environment": {"source": source}}))
    to = tmp_path / "kept.json"
    assert recording.main([str(out), str(other), "--to", str(to)]) == 2 and not to.exists()
    assert "measured of source these; expected other" in capsys.readouterr().err


def test_rows_of_generate_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows replace older ones one by one; those that failed, or were measured beside other work, do not."""
    from bench.report import headline, models_page

    def row(ms: float, replay: float | None = None) -> dict[str, Any]:
        return {"ms_per_token": ms, "floor_ms": 0.5} | ({} if replay is None else {"replay_ms": replay})

    parts = (
        ("2026-11-18", {"qwen3_09b generate 128 1": row(2.0, 2.0), "qwen3_09b generate_fp8 128 1": row(1.6, 1.6)}),
        ("2026-11-19", {
            "qwen3_09b generate 128 1": row(1.25, 1.2), "qwen3_09b generate_fp8 128 1": row(0.5, 1.0),
            "qwen3_09b generate_int4 128 1": {"failed": "x"}, "qwen3_09b hf_compile 128 1": row(2.5),
        }),
    )  # fmt: skip
    to = tmp_path / "kept.json"
    for date, rows in parts:
        run = {"gpu": "NVIDIA H200", "torch": "2.11.0", "peers": {}, "date": f"{date}T00", "commit": "c"}
        file = tmp_path / f"{date}.json"
        file.write_text(json.dumps({"kind": "decode_rows", "rows": rows, "environment": run}))
        assert recording.main([str(file), "--to", str(to)]) == 0
    assert "disturbed: qwen3_09b generate_fp8 128 1, qwen3_09b generate_int4 128 1" in capsys.readouterr().err
    e2e = json.loads(to.read_text())
    (line,) = headline._tokens(e2e)
    assert "800 tokens/s, 40 % of memory speed" in line[1]
    assert (line[2], *line[4:]) == ("1.25 ms", "2.00 x", "2026-11-19")
    page = "\n".join(models_page._generate(e2e["results"]["generate"]))
    assert "| 1.250 (1.200), 800, 40 % | 1.600 (1.600), 625, 31 %, 2026-11-18 | - | - | 2.500 (2.00 x) |" in page


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main([str(tmp_path)]) == 2 and "no result files" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    rate = {"tokens_per_s": 5, "ms": 1.0}
    arm = {"step_ms": 1.0, "tokens_per_s": 10, "peak_mib": None, "losses": [3.0, 2.0]}
    (tmp_path / "train.json").write_text(json.dumps({"model": "dense", "arms": {"hf": arm, "liger": {"absent": "x"}}}))
    arms = {"hf": {"prefill": {"1": rate}, "decode": {"1": rate}}, "ours": {"failed": "x"}}
    (tmp_path / "infer.json").write_text(json.dumps({"kind": "infer", "model": "moe", "arms": arms}))
    run = {"losses": [3.0, 2.0], "held_out": 2.0, "gradients": [{"cosine": 0.99}]}
    arms = {"hf": {"runs": [run]}, "fp8": {"runs": [run, run]}}
    (tmp_path / "parity.json").write_text(json.dumps({"kind": "parity", "model": "dense", "arms": arms}))
    (tmp_path / "other.json").write_text("{}")
    assert plot.main([str(tmp_path)]) == 0 and (tmp_path / "plot.png").stat().st_size > 1000


def test_the_invariant_arm_decodes_at_level_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.tiny_models import build

    from bench.e2e import decode_rows
    from rtkernels.runtime import invariance

    levels = []
    monkeypatch.setattr(decode_rows.Generated, "_measured", lambda *_: levels.append(invariance.level()) or {})
    for arm in ("generate", "generate_invariant"):
        decode_rows.Generated(arm, build("llama")).measure(None, 1)
    assert levels == [0, 1] and invariance.level() == 0


def test_rows_of_decoding(tmp_path, monkeypatch, capsys) -> None:
    """Rows are written one by one, a second call measures what is missing, and bytes are those of a token."""
    from support.tiny_models import build

    from bench.e2e import decode_rows

    out = tmp_path / "rows.json"
    measured = []

    class Ended:
        def poll(self):
            return 0

        def wait(self):
            return 0

    def run(command, environment):
        args = decode_rows.parser().parse_args(command[3:])
        measured.append(args.one)
        for cell in decode_rows.cells(args)[: 1 if len(measured) == 1 else None]:
            numbers = {"ms_per_token": 2.0, "bytes": 10**9, "floor_ms": 0.25, "efficiency": 0.125, "tokens_per_s": 500}
            decode_rows._add(args.out, decode_rows.key_of(*args.one.split(" "), *cell), numbers | {"note": ""})
        return Ended()

    monkeypatch.setattr(decode_rows, "_started", run)
    words = [
        "--rows",
        "--models",
        "llama",
        "--arms",
        "generate",
        "--batches",
        "1,8",
        "--prompts",
        "128",
        "--out",
        str(out),
    ]
    assert infer.main(words) == 0 and len(decode_rows._rows_of(out)) == 1
    assert infer.main([*words, "--continue"]) == 0 and len(decode_rows._rows_of(out)) == 2
    assert infer.main([*words, "--continue"]) == 0 and len(measured) == 2
    assert infer.main([*words, "--continue", "--together", "--models", "llama,gemma3"]) == 0 and len(measured) == 3
    assert "llama generate 128 8" in capsys.readouterr().out
    assert infer.main(words[:-2]) == 0 and "llama generate 128 8" in capsys.readouterr().out  # printed, not kept
    with pytest.raises(SystemExit, match="--continue"):
        infer.main(words)
    assert "failed: no" in decode_rows.line("llama generate 128 1", {"failed": "no"})

    model = build("qwen3_moe")
    config, tensors = model.config, dict(model.named_parameters())
    experts = sum(p.nbytes for name, p in tensors.items() if ".experts." in name)
    rest = sum(p.nbytes for name, p in tensors.items() if ".experts." not in name and "embed" not in name)
    rest += sum(b.nbytes for b in model.buffers())
    width = config.hidden_size // config.num_attention_heads
    keys = 4 * config.num_hidden_layers * config.num_key_value_heads * width * (10 + 3)
    share = config.num_experts_per_tok / config.num_experts
    assert decode_rows.bytes_of(model, 10, 6, 1) == int(rest + experts * share) + keys
    assert decode_rows.bytes_of(model, 10, 6, 64) == rest + experts + 64 * keys
    assert decode_rows.copy_rate("cpu") > 0
