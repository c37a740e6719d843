"""What people train with, on patched models: PEFT, Trainer, torch.compile, checkpoints, copies, recorded outputs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.models import fp8 as quantized

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")

import peft
from support.tiny_models import VOCABULARY, build, largest_error, loss_and_gradients, tokens

# ---- adapters -------------------------------------------------------------------------------------------------------

ADAPTERS = {
    "projections": {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]},
    "head trained": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "adapter of head": {"target_modules": ["q_proj", "lm_head"]},
}


def _with_adapters(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, **options))
    for name, parameter in wrapped.named_parameters():  # which begin as zeros, and then have no gradient behind them
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("order", ["patched first", "adapters first"])
def test_adapters(adapters: str, order: str) -> None:
    loss, gradients = loss_and_gradients(_with_adapters(build("qwen3"), ADAPTERS[adapters]))
    model = build("qwen3")
    if order == "patched first":
        report = models.patch(model)
        model = _with_adapters(model, ADAPTERS[adapters])
    else:
        model = _with_adapters(model, ADAPTERS[adapters])
        report = models.patch(model)
    assert report.replaced["norm"] == 9 and report.replaced["mlp"] == 2 and report.replaced["rope"] == 2
    assert models.report(model) is report
    patched_loss, patched_gradients = loss_and_gradients(model)
    assert patched_loss == pytest.approx(loss, rel=1e-5)
    assert largest_error(patched_gradients, gradients) <= 1e-5
    logits = model(input_ids=tokens(), labels=tokens()).logits
    if adapters == "adapter of head":
        assert isinstance(logits, Tensor)
        assert any("lm_head" in name and float(g.norm()) > 0 for name, g in patched_gradients.items())
        (reason,) = (site.reason for site in report.left_alone) if order == "adapters first" else ("its head",)
        assert "its head" in reason
    else:
        assert type(logits).__name__ == "LazyLogits"
    models.unpatch(model)
    assert largest_error(loss_and_gradients(model)[1], gradients) == 0.0


FP8 = {"fp8": {"fp8": True}, "fused": {"fp8": models.Fp8Recipe(save="input"), "fused_layers": True}}
FP8_ADAPTERS = (["down_proj"], ["q_proj", "v_proj"], ["gate_proj"], "all-linear")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("targets", FP8_ADAPTERS, ids=str)
@pytest.mark.parametrize("options", FP8)
@pytest.mark.parametrize("order", ["patched first", "adapters first"])
def test_adapters_of_fp8_layers(order: str, options: str, targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only adapters are trained, so the input of the first layer needs no gradient."""
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)

    def run_step(patch: Any) -> tuple[float, dict[str, Tensor]]:
        model = build("qwen3", hidden_size=128, intermediate_size=128).bfloat16()
        if order == "patched first":
            patch(model)
        model = _with_adapters(model, {"target_modules": targets})
        patch(model)
        return loss_and_gradients(model, tokens(2, 16))

    loss, gradients = run_step(lambda model: None)
    fp8_loss, found = run_step(lambda model: models.patch(model, **FP8[options]))
    assert fp8_loss == pytest.approx(loss, rel=1e-2) and found.keys() == gradients.keys()
    first, second = (torch.cat([g.flatten().double() for g in x.values()]) for x in (gradients, found))
    assert float(nn.functional.cosine_similarity(first, second, dim=0)) >= 0.98


def test_a_norm_that_is_trained_has_no_weights_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = models.patched(lambda: build("qwen3", num_hidden_layers=1).bfloat16(), fp8=True)
    other = copy.deepcopy(model)
    norm = other.model.layers[0].input_layernorm
    assert [id(m) for m in norm.__dict__[quantized.READERS]] == [
        id(getattr(other.model.layers[0].self_attn, f"{name}_proj")) for name in "qkvo"
    ]
    wrapped = _with_adapters(model, {"target_modules": ["o_proj"], "modules_to_save": ["input_layernorm"]})
    layer = wrapped.get_base_model().model.layers[0]
    readers = layer.input_layernorm.modules_to_save["default"].__dict__[quantized.READERS]
    assert all(any(reader is module for module in layer.modules()) for reader in readers)  # not copies


# ---- Trainer --------------------------------------------------------------------------------------------------------


class _Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = tokens(1, 12 + i % 3, seed=i)[0]
        ids = nn.functional.pad(ids, (0, 14 - len(ids)))
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids != 0).long()}


def _trained(patched: bool, path: Any) -> list[dict[str, float]]:
    from transformers import Trainer, TrainingArguments

    model = build("qwen3")
    if patched:
        models.patch(model)
    seen = []

    def metrics(given: Any) -> dict[str, float]:
        seen.append(given.predictions.shape)
        return {"largest": float(given.predictions.max())}

    arguments = TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=1e-3, logging_steps=1, eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=_Texts(), eval_dataset=_Texts(), compute_metrics=metrics)
    trainer.train()
    assert seen == [(12, 14, VOCABULARY)] * 2
    return trainer.state.log_history


def test_trainer_logs_the_same_losses(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    wanted, got = _trained(False, tmp_path), _trained(True, tmp_path)
    assert len(wanted) == len(got) >= 8
    for one, other in zip(wanted, got, strict=True):
        for name in ("loss", "grad_norm", "eval_loss", "eval_largest"):
            assert (name in one) == (name in other)
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=1e-4), (name, one, other)


# ---- torch.compile --------------------------------------------------------------------------------------------------


def _graphs(model: nn.Module) -> int:
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    ids = tokens()
    torch.compile(model, backend=backend)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return len(found)


@pytest.mark.slow  # test_patch.py compiles a model to one graph, which is as few as there can be
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_as_many_graphs_as_before(kind: str) -> None:
    model = build(kind, num_hidden_layers=1).bfloat16()
    wanted = _graphs(model)
    models.patch(model)
    assert _graphs(model) <= wanted


@pytest.mark.slow
def test_checkpointed_layers_are_one_graph() -> None:
    model = models.patched(lambda: build("qwen3").bfloat16(), fused_layers=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert _graphs(model) == 1


# ---- copies and recorded outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_a_loss_of_their_own(way: str) -> None:
    model = models.patched(lambda: build("qwen3"))
    wanted, gradients = loss_and_gradients(model)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    model.zero_grad()
    loss, same = loss_and_gradients(other)
    assert loss == wanted and largest_error(same, gradients) == 0.0
    assert all(p.grad is None for p in model.parameters())
    logits = other(input_ids=tokens(), labels=tokens()).logits
    assert type(logits).__name__ == "LazyLogits" and logits.head is other.lm_head
    models.unpatch(other)
    assert models.report(model) is not None
    assert type(model(input_ids=tokens(), labels=tokens()).logits).__name__ == "LazyLogits"
    assert isinstance(other(input_ids=tokens(), labels=tokens()).logits, Tensor)


def test_recorded_outputs() -> None:
    model, ids = build("qwen3_moe"), tokens()
    asked = {"output_hidden_states": True, "output_router_logits": True}
    wanted = model(input_ids=ids, labels=ids, **asked)
    models.patch(model)
    got = model(input_ids=ids, labels=ids, **asked)
    assert len(got.hidden_states) == 3 and len(got.router_logits) == 2
    for name in ("hidden_states", "router_logits"):
        for one, other in zip(getattr(wanted, name), getattr(got, name), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert got.aux_loss.item() == pytest.approx(wanted.aux_loss.item(), rel=1e-5)
    assert got.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)


def test_evaluation_of_the_loss_alone() -> None:
    model, ids = models.patched(lambda: build("qwen3")).eval(), tokens()
    wanted = model(input_ids=ids, labels=ids)
    assert isinstance(wanted.logits, Tensor)
    with models.loss_only(model), torch.no_grad():
        got = model(input_ids=ids, labels=ids)
    assert type(got.logits).__name__ == "LazyLogits" and got.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-6)
    assert isinstance(model(input_ids=ids, labels=ids).logits, Tensor)
