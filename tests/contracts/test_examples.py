"""The examples run, and agree with the plain torch they are shown beside."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest
import torch

import rtkernels

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_moe_layer_agrees_with_plain_torch(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "64", "--hidden", "64", "--inner", "32", "--experts", "8", "--top-k", "2", "--repeats", "1"]
    differences = runpy.run_path(str(EXAMPLES / "moe_layer.py"))["main"](["--device", place, *sizes])
    assert set(differences) == {"output", "x", "router", "gate_up", "down"}
    assert all(value < 0.02 for value in differences.values()), differences  # a few bf16 roundings
    assert "plain torch" in capsys.readouterr().out


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_generate_gives_the_tokens_of_transformers(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    example = runpy.run_path(str(EXAMPLES / "generate.py"))
    found = example["main"](["--tiny", "--device", place, "--tokens", "5"])
    assert found.shape == (1, 5) and "5 tokens in" in capsys.readouterr().out
    assert example["main"](["--tiny", "--device", place, "--tokens", "3", "--weights", "int4"]).shape == (1, 3)


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_the_policy_agrees_with_plain_torch(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLES / "vla_policy.py"))["main"](
        ["--tiny", "--device", place, "--repeats", "1", "--skip-compile"]
    )
    assert found["rtkernels bf16"] > 0.999 and found["rtkernels fp8"] > 0.99, found
    printed = capsys.readouterr().out
    assert "torch eager" in printed and "ms (floor)" in printed


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_every_stage_of_the_template_agrees_with_plain_torch(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLES / "policy_template.py"))["main"](["--device", place])
    assert list(found["bf16"]) == ["context", "velocity 0", "velocity 1", "velocity 2", "moved"]
    assert min(found["bf16"].values()) > 0.999 and min(found["fp8"].values()) > 0.99, found
    assert "velocity 2" in capsys.readouterr().out


def test_the_guide_names_what_the_template_has() -> None:
    """Every name of the template that docs/how_to/new_model.md mentions exists there, and its tree has ops only."""
    guide = (EXAMPLES.parent / "docs" / "how_to" / "new_model.md").read_text(encoding="utf-8")
    template = runpy.run_path(str(EXAMPLES / "policy_template.py"))
    names = ("Plain", "Fused", "Model", "FP8", "make_weights", "calibrated", "compared", "captured", "report")
    assert all(name in template and f"`{name}" in guide for name in names)
    tree = re.search(r"```\nimage\n(.+?)```", guide, re.DOTALL)[1]
    ops = {op for line in tree.splitlines() for op in re.findall(r"([a-z]+_[a-z_]+)(?![=\w])", line[49:])}
    assert len(ops) >= 10 and all(hasattr(rtkernels, op) for op in ops), ops


def test_the_method_that_the_guide_adds_is_the_same_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = {"torch": torch, "rtkernels": rtkernels, "policy_template": importlib.import_module("policy_template")}
    guide = (EXAMPLES.parent / "docs" / "how_to" / "new_model.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.+?)```", guide, re.DOTALL)[1], names)
    image = torch.rand(28, 42, 3)
    assert torch.equal(names["Plain"]({}).patches(image), names["Fused"]({}).patches(image))


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_training_learns_and_agrees_with_the_plain_model(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    main = runpy.run_path(str(EXAMPLES / "train.py"))["main"]
    sizes = ["--tiny", "--device", place, "--steps", "12", "--batch", "4", "--length", "48"]
    losses = main(sizes)
    printed = capsys.readouterr().out
    assert "norm" in printed and "tokens/s" in printed
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(main([*sizes, "--plain"]), rel=1e-3 if place == "cpu" else 2e-2)  # bf16 there


def test_training_without_a_gpu_wants_the_small_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    example = runpy.run_path(str(EXAMPLES / "train.py"))
    monkeypatch.setattr(example["torch"].cuda, "is_available", lambda: False)
    monkeypatch.setitem(example["main"].__globals__, "Qwen3ForCausalLM", None)  # no model is built
    with pytest.raises(SystemExit) as caught:
        example["main"](["--steps", "1"])
    assert caught.value.code == 2
    assert "there is no GPU: expected --tiny, or --device cpu" in capsys.readouterr().err
