"""Trainers of TRL with our head: the same losses, metrics and weights, and TRL's own function is never called."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations import trl_trainers
from integrations.trl_trainers import KINDS, TRAINERS, Called, build, same, trained, transformers
from rtkernels import models
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import trl_forward

folders, raising = trl_trainers.folders, trl_trainers.raising


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_training_is_the_same(kind: str, model: str, folders: Any, tmp_path: Path, raising: Any) -> None:
    theirs = trained(build(kind, folders[model], tmp_path))
    trainer = build(kind, folders[model], tmp_path)
    report = models.use_fused_head(trainer)
    names = ["model", "ref_model"] if getattr(trainer, "ref_model", None) is not None else ["model"]
    assert [site.name for site in report.sites] == names and not report.left_alone
    assert kind == "sft" or len(names) == 2
    raising()
    same(trained(trainer), theirs)


def test_trls_function_raises(folders: Any, tmp_path: Path, raising: Any) -> None:
    trainer = build("sft", folders["qwen3"], tmp_path)
    raising()
    with pytest.raises(Called):
        trainer.train()


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_lora(kind: str, folders: Any, tmp_path: Path, raising: Any) -> None:
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)

    theirs = trained(build(kind, folders["qwen3"], tmp_path, lora()))
    trainer = build(kind, folders["qwen3"], tmp_path, lora())
    assert models.use_fused_head(trainer, save="projected").replaced["head"] == 1
    raising()
    same(trained(trainer), theirs)


def test_trained_copy_of_the_head(folders: Any, tmp_path: Path, raising: Any) -> None:
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"], r=4)

    theirs = trained(build("sft", folders["qwen3"], tmp_path, lora()))
    trainer = build("sft", folders["qwen3"], tmp_path, lora())
    assert not models.use_fused_head(trainer).left_alone
    raising()
    same(trained(trainer), theirs)


def test_padding_free(folders: Any, tmp_path: Path, raising: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = trained(build("sft", folders["qwen3"], tmp_path, padding_free=True, max_length=None))
        trainer = build("sft", folders["qwen3"], tmp_path, padding_free=True, max_length=None)
    models.use_fused_head(trainer)
    raising()
    same(trained(trainer), theirs)


def test_head_in_fp32(folders: Any, tmp_path: Path, raising: Any) -> None:
    theirs = trained(build("grpo", folders["qwen3"], tmp_path, cast_lm_head_to_fp32=True))
    trainer = build("grpo", folders["qwen3"], tmp_path, cast_lm_head_to_fp32=True)
    assert not models.use_fused_head(trainer).left_alone
    raising()
    same(trained(trainer), theirs)


def batch(mask: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 9))
    labels = ids.masked_fill(torch.arange(9) < (9 if mask else 4), -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.fixture
def pair(folders: Any, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A trainer's model with TRL's head, and one with ours."""
    theirs, ours = (build("sft", folders["gemma2"], tmp_path) for _ in range(2))
    models.use_fused_head(ours)
    yield theirs.model, ours.model


def test_nothing_counts(pair: Any) -> None:
    outputs = [model(**(given := batch(mask=True)), fused_lm_head=True) for model in pair]
    for model, output in zip(pair, outputs, strict=True):
        output.loss.backward()
        assert output.loss == 0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
        assert any(p.grad is not None for p in model.parameters())
    assert given["labels"].shape == (2, 9) and outputs[1].log_probs.shape == (2, 8)


def test_outputs_and_gradients(pair: Any) -> None:
    given = batch()
    shifted = {"input_ids": given["input_ids"], "shift_labels": given["labels"]}
    for inputs in ({**given, "num_items_in_batch": 7}, given, shifted):
        theirs, ours = (model(**inputs, fused_lm_head=True) for model in pair)
        assert type(theirs) is type(ours) and theirs.keys() == ours.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)
        for model, output in zip(pair, (theirs, ours), strict=True):
            model.zero_grad()
            (output.loss + 0.3 * output.entropy.sum()).backward()
        for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-5)


def test_without_the_fused_head_nothing_changes(pair: Any) -> None:
    given = batch()
    theirs, ours = (model(**given) for model in pair)
    assert torch.equal(theirs.logits, ours.logits) and torch.equal(theirs.loss, ours.loss)
    generated = [model.generate(given["input_ids"], max_new_tokens=4, do_sample=False) for model in pair]
    assert torch.equal(*generated)


def test_a_patched_model(folders: Any, tmp_path: Path, raising: Any) -> None:
    theirs = trained(build("sft", folders["qwen3"], tmp_path))
    trainer = build("sft", folders["qwen3"], tmp_path)
    models.patch(trainer.model)
    models.use_fused_head(trainer)
    raising()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*use_fused_head.*")
        same(trained(trainer), theirs, 1e-4)


def test_patch_warns_of_trls_head(folders: Any, tmp_path: Path) -> None:
    trainer = build("sft", folders["qwen3"], tmp_path)
    models.patch(trainer.model)
    with pytest.warns(UserWarning, match="call rtkernels.models.use_fused_head"):
        trainer.model(**batch(), fused_lm_head=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.model(**batch(), fused_lm_head=True)


@pytest.mark.parametrize("patched", [False, True])
def test_unpatch_restores_trls_head(patched: bool, folders: Any, tmp_path: Path, raising: Any) -> None:
    trainer = build("sft", folders["qwen3"], tmp_path)
    before, head = trainer.model.forward.__func__, type(trainer.model.lm_head)
    if patched:
        models.patch(trainer.model)
    models.use_fused_head(trainer)
    models.use_fused_head(trainer, save="logits")
    models.unpatch(trainer.model)
    assert trainer.model.forward.__func__ is before and type(trainer.model.lm_head) is head
    raising()
    with pytest.raises(Called):
        trainer.model(**batch(), fused_lm_head=True)


def test_forward_behind_mixed_precision(folders: Any, tmp_path: Path, raising: Any) -> None:
    """Accelerate wraps the reference's forward while the trainer is built, and the policy's when training begins."""
    trainer = build("dpo", folders["qwen3"], tmp_path, bf16=True)
    assert trl_forward.find(trainer.ref_model, trl_forward.is_trl) is not None
    assert not trl_forward.is_trl(trainer.ref_model.forward.__func__)
    report = models.use_fused_head(trainer)
    assert report.replaced["head"] == 2
    ours = trained(trainer)
    theirs = trained(build("dpo", folders["qwen3"], tmp_path, bf16=True))
    for mine, wanted in zip(ours[0], theirs[0], strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=2e-2)
    raising()
    models.unpatch(trainer.ref_model)
    with pytest.raises(Called):
        trainer.ref_model(**batch(), fused_lm_head=True)


# ---- refused --------------------------------------------------------------------------------------------------------


def test_other_trainers_are_refused(folders: Any, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen3"])
    args = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(RtkError, match="this Trainer has no fused head of TRL"):
        models.use_fused_head(transformers.Trainer(model, args))
    with pytest.raises(ArgumentError, match="trainer is a str without a model"):
        models.use_fused_head("trainer")


def test_options_are_checked(folders: Any, tmp_path: Path) -> None:
    trainer = build("sft", folders["qwen3"], tmp_path)
    with pytest.raises(ArgumentError, match="save is 'all'"):
        models.use_fused_head(trainer, save="all")


def test_other_heads_keep_trls(folders: Any, tmp_path: Path) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    trainer = build("sft", folders["qwen3"], tmp_path)
    trainer.model.lm_head.__class__ = Scaled
    with pytest.warns(UserWarning, match="model keeps TRL's head: its head is a Scaled, no plain nn.Linear"):
        report = models.use_fused_head(trainer)
    assert report.left_alone[0].name == "model" and "head" not in report.replaced
    trainer.model(**batch(), fused_lm_head=True)


def test_unknown_options_keep_trls(folders: Any, tmp_path: Path) -> None:
    trainer = build("sft", folders["qwen3"], tmp_path)
    function, _ = trl_forward.find(trainer.model, trl_forward.is_trl)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    cells["outputs"].cell_contents = ("log_probs", "entropy", "is_top1", "variance")
    with pytest.warns(UserWarning, match="asks its head for variance"):
        report = models.use_fused_head(trainer)
    assert report.left_alone and trl_forward.find(trainer.model, trl_forward.is_trl)


def test_copies_are_independent(pair: Any) -> None:
    copied = copy.deepcopy(pair[1])
    models.unpatch(copied)
    assert trl_forward.find(pair[1], trl_forward.is_ours) is not None
