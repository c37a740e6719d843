"""TRL's trainers without its fused head: CPO, ORPO and distillation, with lazy logits and ``linear_divergence``."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations import trl_trainers
from integrations.trl_trainers import KINDS, OTHERS, Called, build, same, trained, transformers
from rtkernels import models
from rtkernels.errors import RtkError
from rtkernels.models import lazy_logits, trl_distillation, trl_pairs, trl_values

folders = trl_trainers.folders


def raise_in(trainer: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what TRL's own code of a trainer calls by a function that raises."""

    class Raises:
        def __new__(cls, *args: Any) -> Any:
            raise Called

        apply = __new__

    methods = (trainer.__class__, "_compute_loss" if kind == "Distillation" else "get_batch_logps")
    module = sys.modules[getattr(*methods).__globals__["__name__"]]
    monkeypatch.setattr(module, OTHERS[kind][1], Raises)


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_trainers(kind: str, model: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = trained(build(kind, folders[model], tmp_path))
    trainer = build(kind, folders[model], tmp_path)
    if kind == "Distillation" and model == "gemma2":
        with pytest.warns(UserWarning, match="keeps TRL's loss: the logits of its student have a soft cap"):
            assert models.use_fused_head(trainer).left_alone
        return
    with monkeypatch.context() as patch:
        raise_in(trainer, kind, patch)
        with pytest.raises(Called):
            trainer.train()
    trainer = build(kind, folders[model], tmp_path)
    report = models.use_fused_head(trainer)
    assert [site.name for site in report.sites] == ["model"] and not report.left_alone
    raise_in(trainer, kind, monkeypatch)
    monkeypatch.setattr(lazy_logits.LazyLogits, "_make", _no_logits)
    monkeypatch.setattr(trl_pairs.PairLogits, "_make", _no_logits)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*use_fused_head.*")
        same(trained(trainer), theirs)
    models.unpatch(trainer.model)
    with pytest.raises(Called):
        trainer.train()


def _no_logits(self: Any) -> Any:
    raise AssertionError("logits were computed")


@pytest.mark.parametrize("kind", ["CPO", "Distillation"])
def test_other_trainers_with_lora(kind: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)

    theirs = trained(build(kind, folders["qwen3"], tmp_path, lora()))
    trainer = build(kind, folders["qwen3"], tmp_path, lora())
    assert models.use_fused_head(trainer, save="projected").replaced["head"] == 1
    raise_in(trainer, kind, monkeypatch)
    same(trained(trainer), theirs)


@pytest.mark.parametrize("kind", ["ORPO", "Distillation"])
def test_other_trainers_with_mixed_precision(
    kind: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trained(build(kind, folders["qwen3"], tmp_path, bf16=True))
    trainer = build(kind, folders["qwen3"], tmp_path, bf16=True)
    models.use_fused_head(trainer)
    raise_in(trainer, kind, monkeypatch)
    monkeypatch.setattr(trl_pairs.PairLogits, "_make", _no_logits)
    ours = trained(trainer)
    for mine, wanted in zip(ours[0], theirs[0], strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=2e-2, abs=2e-3)


@pytest.mark.parametrize("kind", ["CPO", "ORPO", "Distillation"])
def test_other_trainers_of_patched_models(
    kind: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trained(build(kind, folders["qwen3"], tmp_path))
    trainer = build(kind, folders["qwen3"], tmp_path)
    models.patch(trainer.model)
    models.use_fused_head(trainer)
    raise_in(trainer, kind, monkeypatch)
    monkeypatch.setattr(trl_pairs.PairLogits, "_make", _no_logits)
    same(trained(trainer), theirs, 1e-4)


def test_pair_logits(folders: Any) -> None:
    """Slices and losses come from hidden states, everything else from the logits, all with the same values."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["gemma2"])
    head = model.lm_head
    trl_values.prepare_head(model)
    hidden = torch.randn(4, 7, 64, requires_grad=True)
    labels = torch.randint(0, 64, (4, 7)).masked_fill(torch.rand(4, 7) < 0.3, -100)
    shaping = lazy_logits.Shaping(0.5, 3.0)
    given = {"save": "stats", "chunk_bytes": None}
    logits = trl_pairs.PairLogits(hidden, head, shaping, nullcontext, given)
    whole = 3.0 * torch.tanh(0.5 * torch.nn.functional.linear(hidden, head.weight) / 3.0)
    for part, wanted in (
        (logits[:2], whole[:2]), (logits[..., :-1, :], whole[..., :-1, :]), (logits[1:, :-1, :], whole[1:, :-1, :]),
        (logits[:, 2:].contiguous(), whole[:, 2:]), (logits.view(-1, 64), whole.view(-1, 64)),
    ):  # fmt: skip
        assert isinstance(part, trl_pairs.PairLogits) and part.shape == wanted.shape
        torch.testing.assert_close(part.tensor(), wanted)
        torch.testing.assert_close(part.detach().mean(), wanted.mean())
    for part, wanted in (
        (logits[0], whole[0]),
        (logits[..., :3], whole[..., :3]),
        (logits[labels > 3], whole[labels > 3]),
    ):
        assert isinstance(part, torch.Tensor)
        torch.testing.assert_close(part, wanted)
    torch.testing.assert_close(logits.mean(-1), whole.mean(-1))
    torch.testing.assert_close(logits.softmax(-1), whole.softmax(-1))
    for reduction in ("mean", "sum", "none"):
        found, wanted = (
            torch.nn.functional.cross_entropy(t.view(-1, 64), labels.view(-1), reduction=reduction)
            for t in (logits, whole)
        )
        torch.testing.assert_close(found, wanted)
    smooth = [
        torch.nn.functional.cross_entropy(t.view(-1, 64), labels.view(-1), label_smoothing=0.1) for t in (logits, whole)
    ]
    torch.testing.assert_close(*smooth)
    found = logits.log_probs(labels)
    wanted = whole.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0.0)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(t.square().sum(), hidden, retain_graph=True)[0] for t in (found, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("counts", [False, True])
def test_divergence_of_rows(counts: bool) -> None:
    """What TRL's function returns, for numbers that its trainer does not use here."""
    import trl.trainer.distillation_trainer as theirs

    sizes = (2, 5, 16), (2, 5, 24), (33, 16), (33, 24)
    student, other, weight, of_other = (torch.randn(*size) for size in sizes)
    biases = torch.randn(33), torch.randn(33)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 1]]) * counts
    for beta, warmth, scale, items in ((0.0, 1.0, 1.0, None), (1.0, 0.7, 0.5, 5), (0.4, 2.0, 3.0, torch.tensor(7))):
        found = []
        for function in (theirs._chunked_divergence_loss, trl_distillation._divergence):
            leaves = [t.clone().requires_grad_() for t in (student, weight, biases[0])]
            results = function(
                leaves[0], other, leaves[1], of_other, mask, beta, items, leaves[2], biases[1],
                student_logit_scale=scale, teacher_logit_scale=scale, temperature=warmth,
            )  # fmt: skip
            results[0].backward()
            found.append([*(t.detach() for t in results), *(leaf.grad for leaf in leaves)])
        for mine, wanted in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(RtkError, match="scaled by 2"):
        trl_distillation._divergence(student, other, weight, of_other, mask, 0.0, student_logit_scale=2.0)
