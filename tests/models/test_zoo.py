"""A sample of the zoo by kind: classes that no other test names. ``python -m bench zoo`` tries all of them."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from pathlib import Path

import pytest
import torch
from support.interpreter import environment, run_python
from torch import nn

pytest.importorskip("transformers", minversion="5.0")

import rtkernels.models.attention
from bench.zoo import build, compare, diffusion, products, run, steps, table

CHEAP = {  # a class and the options that have something to replace in it
    "MiniMaxM2ForCausalLM": ["default", "router"],
    "NemotronModel": ["default"],
    "ElectraForTokenClassification": ["default", "attention"],
    "ViTForImageClassification": ["default", "fp8"],
}
LONGER = {
    "Starcoder2ForSequenceClassification": ["default", "fused_layers", "fp8"],
    "HunYuanMoEV1ForCausalLM": ["default", "fused_layers", "router", "fp8"],
    "T5ForConditionalGeneration": ["default", "attention"],
    "GroupViTModel": ["default", "fp8"],
    "YolosModel": ["default", "attention", "fp8"],
    "WhisperForConditionalGeneration": ["default", "attention", "fp8"],
    "LlavaForConditionalGeneration": ["default", "fused_layers", "attention"],
    "PatchTSTForRegression": ["default", "fp8"],
}
DIFFUSION = {"SD3Transformer2DModel": ["default", "fp8"], "UNet2DConditionModel": ["default", "fp8"]}


def kept(name: str, options: list[str], library: str = "transformers") -> None:
    found = run.result_of(name, library, options=options)
    assert found is not None and "options" in found, found
    assert table.status_of(found) == "kept", found["options"]
    assert found["options"]["default"]["status"] == "kept"


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.one_in(3)
def test_keeps_results_and_gradients(name: str) -> None:
    kept(name, CHEAP[name])


@pytest.mark.one_in(1000)
def test_keeps_classes_that_once_broke() -> None:
    kept("DeepseekV4Model", ["default", "attention"])  # it adds numbers to eager attention's mask
    kept("HiggsAudioV2ForConditionalGeneration", ["default", "fp8"])  # an expert for audio, without tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_keeps_results_and_gradients_of_other_kinds(name: str) -> None:
    kept(name, LONGER[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFUSION)
def test_keeps_results_and_gradients_of_diffusion_models(name: str) -> None:
    pytest.importorskip("diffusers")
    kept(name, DIFFUSION[name], "diffusers")


SIZE = 5e-2  # of a planted change in bf16, where the own error of results is about 0.5 % and may be three times that


class Small(nn.Module):
    """A model whose second layer can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.second(self.norm(self.first(x))),)


@pytest.mark.parametrize("size", [3e-5, 1e-2])
@pytest.mark.parametrize("what", ["result", "gradient"])
def test_a_change_is_seen(what: str, size: float) -> None:
    model = Small()
    built = build.Built(model, {"x": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))}, False)
    before = compare.Before(model, built)
    assert before.check(model) == 0.0

    def wrong(_: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        return result * (1 + size) if what == "result" else result + (result - result.detach()) * size

    model.norm.register_forward_hook(wrong)
    with pytest.raises(steps.Changed, match=r"result|gradient of"):
        before.check(model)


def test_an_error_of_fp8s_size_is_kept_and_a_larger_one_is_not() -> None:
    model = Small()
    built = build.Built(model, {"x": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))}, False)
    wanted, others = steps.train(model, built), []
    for number in range(3):
        with steps.like_codes(model, ["first", "second"], number):
            others.append(steps.train(model, built))
    assert not torch.equal(others[0].results["[0]"], wanted.results["[0]"])
    tolerance = steps.Tolerance(wanted, others[:2], steps.FACTOR_FP8, steps.FLOOR_HALF)
    assert 0.0 < tolerance.check(others[2]) < 1.0
    with torch.no_grad():
        model.second.weight[:4] *= 1.5
    with pytest.raises(steps.Changed):
        tolerance.check(steps.train(model, built))


@pytest.mark.parametrize("what", ["result", "gradient"])
def test_a_change_in_bf16_is_seen(what: str) -> None:
    """The model's own rounding is allowed three times, a change of the use of one weight is not."""
    model = Small().bfloat16()
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    built = build.Built(model, {"x": x}, False)
    tolerance = compare.half_tolerance(model, built, steps.train)
    assert 0.0 < tolerance.check(steps.train(model, built)) <= 1 / steps.FACTOR_HALF

    def wrong(_: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        return result * (1 + SIZE) if what == "result" else result + (result - result.detach()) * SIZE

    model.norm.register_forward_hook(wrong)
    with pytest.raises(steps.Changed, match=r"result|gradient of"):
        tolerance.check(steps.train(model, built))


def test_gradients_that_are_zero_but_for_rounding() -> None:
    """They may be as far apart as a part of others: in bf16 of those in the same module; elsewhere they may not."""
    gradients = {"a.value.bias": torch.full((4,), 2.0), "a.key.bias": torch.full((4,), 1e-9)}
    gradients |= {"a.sinks": torch.full((4,), 1e-9), "b.key.bias": torch.full((4,), 1e-9)}
    wanted = steps.Step({}, gradients)
    for half, size in ((False, 1e-7), (True, 2.0**-9)):
        tolerance = steps.Tolerance(wanted, [wanted], 1.0, 0.0, half=half)
        for name in ("a.key.bias", "a.sinks", "b.key.bias"):
            if not half or name[0] == "a":
                tolerance.check(steps.Step({}, {**gradients, name: torch.full((4,), size)}))
            with pytest.raises(steps.Changed, match=f"gradient of {name}"):
                small = half and name[0] == "b"
                tolerance.check(steps.Step({}, {**gradients, name: torch.full((4,), size if small else 10 * size)}))


def test_more_samples_explain_an_error_or_do_not() -> None:
    def step(value: float) -> steps.Step:
        return steps.Step({"x": torch.full((4,), value)}, {})

    more, asked = [step(1.1), step(1.2)], []

    def samples(count: int):
        for sample in more[:count]:
            asked.append(sample)
            yield sample

    def tolerance() -> steps.Tolerance:
        return steps.Tolerance(step(1.0), [step(1.05)], 1.5, 0.0)

    assert compare._explained(step(1.07), tolerance(), samples(2)) == pytest.approx(0.07 / 0.075, rel=1e-3)
    assert not asked  # few samples are enough
    assert compare._explained(step(1.25), tolerance(), samples(2)) == pytest.approx(0.25 / 0.3, rel=1e-3)
    with pytest.raises(steps.Changed, match="result x"):
        compare._explained(step(1.4), tolerance(), samples(2))


def test_models_that_write_to_their_inputs() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
            made = self.table(input_ids.clone())
            input_ids += 1
            return (made,)

    built = build.Built(Writer(), {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, False)
    assert compare.Before(built.model, built).check(built.model) == 0.0


def test_models_that_do_not_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Small):
        calls = 0

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            Counting.calls += 1
            return (super().forward(x)[0] * Counting.calls,)

    built = build.Built(Counting(), {"x": torch.ones(2, 4, 16)}, False)
    with pytest.raises(steps.NotRepeatable, match="train gives other results when it is called again"):
        compare.Before(built.model, built)
    monkeypatch.setattr(build, "build", lambda name: built)
    found = run.result_of("ViTModel", "transformers")
    assert found is not None and table.status_of(found) == "not repeatable"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_change_of_attention_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole model: 1 % in fp32, where torch's attention is called, and 5 % in bf16, where ours is."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size = 1 + (steps.SEEN if dtype == torch.float32 else steps.SEEN_HALF)
    attention = rtkernels.models.attention

    def wrong(module, query, *args, **kwargs):
        result, weights = right(module, query, *args, **kwargs)
        return (result * size if query.dtype == dtype else result), weights

    right = attention.attention_forward
    monkeypatch.setattr(attention, "attention_forward", wrong)
    try:
        found = run.result_of("ElectraForTokenClassification", "transformers", options=["attention"])
    finally:
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, right)
        ALL_ATTENTION_FUNCTIONS.register(attention.WHOLE, right)
    assert found is not None and table.status_of(found) == "changed", found["options"]
    assert re.search("result|gradient", found["options"]["attention"]["why"])


def products_are_rounded_once() -> None:
    products.are_slow = lambda: True
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, 8, 16, generator=generator).bfloat16() for _ in range(2))

    def results(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = [x[0] @ w[0].T, torch.bmm(x, w.transpose(1, 2)), torch.conv1d(x, w[:, :, :3].contiguous())]
        for mask in (None, x[0, :, :8]):
            y.append(nn.functional.scaled_dot_product_attention(x[None], w[None], w[None], mask))
        torch.cat([t.flatten() for t in y]).sum().backward()
        return [*y, x.grad, w.grad]  # type: ignore[list-item]

    before, exact = results(x, w), results(x.float(), w.float())
    with products.rounded_once():
        got, same = results(x, w), results(x.float(), w.float())
    for a, b, c, d, e in zip(got, exact, same, before, results(x, w), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(d, e)
        torch.testing.assert_close(c, b)
        torch.testing.assert_close(a.float(), b, rtol=2.0**-5, atol=2.0**-5)
    for i in range(5):
        assert torch.equal(got[i], exact[i].bfloat16())
    print("as expected")


@pytest.mark.one_in(3)
def test_products_are_rounded_once() -> None:
    """Where torch's bf16 is slow, products are those of fp32, rounded; elsewhere and afterwards torch's own.

    In a process of its own: after ``batch_invariant`` in the emulator, torch's products on the CPU stay overridden,
    and torch allows one override.
    """
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("torch does not let its operators be exchanged")
    env = environment(*Path(__file__).resolve().parents[1:3])
    done = run_python("-c", "from models import test_zoo; test_zoo.products_are_rounded_once()", env=env)
    assert done.stdout == "as expected\n", done.stderr


def test_soft_caps_are_computed() -> None:
    for name in ("Gemma2Model", "T5GemmaForConditionalGeneration"):
        config = build.config_of(build.class_of(name), build.classes()[name][0], 0)
        assert config._attn_implementation == "eager"
    config = build.config_of(build.class_of("LlamaModel"), "llama", 0)
    assert config._attn_implementation != "eager"


def test_most_classes_have_a_kind() -> None:
    found = build.classes()
    assert len(found) > 1000
    kinds = {name: build.kind_of(build.class_of(name), found[name][0]) for name in [*CHEAP, *LONGER]}
    assert set(kinds.values()) == {
        "decoder", "encoder", "encoder-decoder", "vision", "audio", "multimodal", "time series"
    }  # fmt: skip


def test_forms_name_classes_of_diffusers() -> None:
    pytest.importorskip("diffusers")
    assert len(diffusion.classes()) > 40


def test_results_are_counted_by_their_worst_option() -> None:
    results = [
        {"class": "A", "kind": "vision", "options": {"default": {"status": "kept"}, "fp8": {"status": "crashed"}}},
        {"class": "B", "kind": "vision", "options": {"default": {"status": "kept"}, "fp8": {"status": "nothing"}}},
        {"class": "C", "kind": "audio", "reason": "needs a library"},
        {"class": "D", "kind": "audio", "reason": "train gives other results", "outcome": table.NOT_REPEATABLE},
        {"class": "E", "kind": "audio", "reason": "took more than 60 s comparing", "outcome": table.TOO_SLOW},
    ]
    lines = table.lines_of(results, {"transformers": "5.0", "diffusers": None})
    assert "| vision | 2 | 2 | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in lines
    assert "| audio | 3 | 0 | 0 | 0 | 0 | 0 | 1 | 1 | 1 |" in lines
    assert "| fp8 | 0 | 1 | 0 | 1 |" in lines and lines[-1] == "transformers 5.0."
    assert table.lines_of(results, {"transformers": "5.0"}, note="Here.")[-1] == "transformers 5.0. Here."


def test_share_of_tensors_that_show_a_change() -> None:
    options = {"default": {"status": "kept", "seen": [99, 100]}, "attention": {"status": "kept", "seen half": [3, 4]}}
    results = [{"class": "A", "kind": "vision", "options": options}] * 2
    said = "A change of 1% of its norm would be seen in 99.00 % of 200 results and gradients in fp32, one of 5% in "
    assert f"{said}75.00 % of 8 in bf16." in table.lines_of(results, {"torch": "2.0"})


def test_versions_are_those_of_the_results(tmp_path) -> None:
    one = {"transformers": "5.17.0", "diffusers": None, "torch": "2.13.0"}
    results = [{"class": "A", "kind": "vision", "versions": one}, {"class": "B", "kind": "vision", "versions": one}]
    run.record(tmp_path / "one.json", results, 2)
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))["versions"] == one
    results[1] = {**results[1], "versions": {**one, "transformers": "5.23.0"}}
    run.record(tmp_path / "two.json", results, 2)
    found = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))
    assert found["versions"]["transformers"] == "5.17.0 and 5.23.0" and found["versions"]["torch"] == "2.13.0"
    assert [r["versions"]["transformers"] for r in found["results"]] == ["5.17.0", "5.23.0"]
    assert run.versions_of([{"class": "C"}])["torch"] == "not recorded"


def test_a_run_is_continued(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "zoo.jsonl", []

    def results(tasks, *args):
        asked.append([name for name, _ in tasks])
        for name, _ in tasks:
            yield {"class": name, "kind": "vision", "options": {"default": {"status": "kept"}}}

    monkeypatch.setattr(run, "results", results)
    monkeypatch.setattr(run, "names", lambda: dict.fromkeys(("A", "B", "C"), "transformers"))
    assert run.main(["--only", "A", "B", "--json", str(path)]) == 0
    assert run.main(["--json", str(path), "--record", str(tmp_path / "all.json"), "--note", "All."]) == 0
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))["note"] == "All."
    assert asked == [["A", "B"], ["C"]] and run.load(tmp_path / "all.json").keys() == {"A", "B", "C"}


def test_table_in_the_guide() -> None:
    document = run.page().read_text(encoding="utf-8")
    assert document.count(table.MARK) == 2
    twice = table.written(table.written(document, ["one"]), ["| two |"])
    assert f"{table.MARK}\n| two |\n{table.MARK}" in twice and "one" not in twice.split(table.MARK)[1]


@pytest.mark.parametrize("stage", ["building", run.COMPARING])
def test_a_process_that_ends(stage: str) -> None:
    worker = run.Worker(None, None)
    worker.pipe, peer = multiprocessing.Pipe()
    worker.task, worker.begin, worker.stage = ("ViTModel", "transformers"), time.monotonic(), "building"
    assert worker.take(60) is None and worker.task is not None
    if stage == run.COMPARING:
        peer.send(stage)
    peer.close()
    found = worker.take(60)
    assert found is not None and worker.task is None and found["kind"] == "vision"
    assert table.status_of(found) == ("crashed" if stage == run.COMPARING else "not built")


def test_a_class_that_takes_too_long() -> None:
    worker = run.Worker(None, None)
    worker.pipe, _peer = multiprocessing.Pipe()
    worker.task, worker.begin, worker.stage = ("ViTModel", "transformers"), time.monotonic() - 61, "building"
    found = worker.take(60)
    assert found is not None and found["reason"] == "took more than 60 s building"
    assert table.status_of(found) == "not built"
    worker.task, worker.begin, worker.stage = ("ViTModel", "transformers"), time.monotonic() - 61, run.COMPARING
    worker.pipe, _peer = multiprocessing.Pipe()
    found = worker.take(60)
    assert found is not None and table.status_of(found) == "too slow"
