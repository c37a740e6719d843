"""Expert layers, routers, heads and losses that only look like those of the library are rejected, and reported."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import rtkernels
from rtkernels import models
from rtkernels.models import chosen_experts

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

# ---- experts --------------------------------------------------------------------------------------------------------


class Louder(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


class WeightsDetached(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.detach())


class FirstOnly(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index[:, :1], top_k_weights[:, :1])


class GateClamped(Qwen3MoeExperts):
    def _apply_gate(self, gate_up_out):
        gate, up = gate_up_out.chunk(2, -1)
        return self.act_fn(gate.clamp(max=1e6)) * up


class InEvaluation(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = super().forward(hidden_states, top_k_index, top_k_weights)
        return result if self.training else 2 * result


REFUSED_EXPERTS = {
    Louder: "other results",
    WeightsDetached: "other gradients of its input",
    FirstOnly: "other results",
    GateClamped: "its gate computes none of our activations",
    InEvaluation: "other results",
}


@pytest.mark.parametrize("cls", [Qwen3MoeExperts, *REFUSED_EXPERTS], ids=lambda cls: cls.__name__)
def test_experts(cls: type[nn.Module]) -> None:
    model = build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = cls
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model)
    sites = [site for site in report.sites if site.kind == "experts"]
    assert len(sites) == 2
    if cls in REFUSED_EXPERTS:
        assert all(REFUSED_EXPERTS[cls] in (site.reason or "") for site in sites), report
    else:
        assert all(site.reason is None for site in sites)
    again, same = loss_and_gradients(model)
    assert again == pytest.approx(loss, rel=1e-5) and largest_error(same, gradients) <= 1e-5


def test_as_many_experts_as_columns() -> None:
    report = models.patch(build("qwen3_moe", num_experts=32, moe_intermediate_size=32))
    assert report.replaced["experts"] == 2, report


def test_candidates_by_role_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_experts, "FORMS", set())
    report = models.patch(build("llama4_text"))
    assert {(site.kind, site.module) for site in report.left_alone} == {("experts", "Llama4TextExperts")}
    with pytest.raises(rtkernels.errors.RtkError, match="Llama4TextExperts"):
        models.patch(build("llama4_text"), strict=True)
    assert models.patch(build("lfm2")).replaced["mlp"] == 2


def test_t5_feed_forward_is_a_candidate() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    options = {"d_model": 64, "d_ff": 96, "feed_forward_proj": "gated-gelu"}
    plain, dropping = (T5DenseGatedActDense(T5Config(**options, dropout_rate=rate)) for rate in (0.0, 0.1))
    x = torch.randn(2, 5, 64)
    wanted = dropping.eval()(x)
    report = models.patch(nn.Sequential(plain, dropping), loss=False)
    assert [site.reason for site in report.sites if site.kind == "mlp"] == [None, None]
    torch.testing.assert_close(dropping(x), wanted)
    assert bool((dropping.train()(x) - wanted).abs().max() > 0.01)


# ---- routers --------------------------------------------------------------------------------------------------------


class Temperature(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        return super().forward(hidden_states * 0.5)


class Jitter(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        noise = 1 + 1e-8 * torch.rand_like(hidden_states) if self.training else 1
        return super().forward(hidden_states * noise)


class InputDetached(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        return super().forward(hidden_states.detach())


class ProbsDetached(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        logits, probs, indices = super().forward(hidden_states)
        return logits, probs.detach(), indices


REFUSED_ROUTERS = {
    Temperature: "its logits are no plain product",
    Jitter: "it draws random numbers",
    InputDetached: "other gradients of its input",
    ProbsDetached: "other gradients",
}


@pytest.mark.parametrize("cls", [Qwen3MoeTopKRouter, *REFUSED_ROUTERS], ids=lambda cls: cls.__name__)
def test_router(cls: type[nn.Module]) -> None:
    model = build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = cls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = models.patch(model, router=True)
    reasons = [site.reason for site in report.sites if site.kind == "router"]
    if cls in REFUSED_ROUTERS:
        assert len(reasons) == 2 and all(REFUSED_ROUTERS[cls] in (reason or "") for reason in reasons), report
    else:
        assert reasons == [None, None], report


# ---- heads and losses -----------------------------------------------------------------------------------------------


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    own = rtkernels.linear_cross_entropy

    def counting(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(rtkernels, "linear_cross_entropy", counting)
    return calls


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bert", "gpt2", "bart", "opt", "xglm", "trocr", "xlm"])
def test_loss_counts_if_it_is_called(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build(kind), _counted(monkeypatch)
    model.config.use_cache = False
    report = models.patch(model, mlp=False, rope=False)
    (site,) = [site for site in report.sites if site.kind == "loss"]
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert len(calls) == (site.reason is None) == (kind in ("llama", "gemma2", "bert", "gpt2")), report


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_loss_of_encoder_and_decoder(kind: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

    small = {"d_model": 32, "vocab_size": 64, "decoder_start_token_id": 0, "pad_token_id": 0}
    layers = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    with torch.device("meta"):
        if kind == "t5":
            model = T5ForConditionalGeneration(T5Config(num_layers=1, d_ff=64, d_kv=8, num_heads=4, **small))
        else:
            model = WhisperForConditionalGeneration(WhisperConfig(**layers, **small))
    report = models.patch(model)
    (site,) = [site for site in report.sites if site.kind == "loss"]
    assert site.reason is not None and "makes the logits" in site.reason


class ScaledHead(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_another_head() -> None:
    model = build("llama")
    model.lm_head.__class__ = ScaledHead
    loss, gradients = loss_and_gradients(model)
    (site,) = [site for site in models.patch(model).sites if site.kind == "loss"]
    assert site.reason == "its head is a ScaledHead, no plain nn.Linear"
    again, same = loss_and_gradients(model)
    assert again == pytest.approx(loss, rel=1e-5) and largest_error(same, gradients) <= 1e-5


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_head_run_once(when: str) -> None:
    def double(module, args):
        return (2 * args[0],)

    wanted = build("llama")
    wanted.lm_head.register_forward_pre_hook(double)
    loss, gradients = loss_and_gradients(wanted)
    model = build("llama")
    if when == "before":
        model.lm_head.register_forward_pre_hook(double)
    report = models.patch(model)
    if when == "before":
        assert [s.reason for s in report.sites if s.kind == "loss"] == ["its head has hooks, which see logits"]
    else:
        model.lm_head.register_forward_pre_hook(double)
    again, same = loss_and_gradients(model)
    assert again == pytest.approx(loss, rel=1e-5) and largest_error(same, gradients) <= 1e-5


def test_a_forward_that_looks_at_its_logits() -> None:
    from transformers import LlamaForCausalLM

    class Masked(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            logits = logits.masked_fill(logits > 1e9, 0)
            return (self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size),)

    model = build("llama")
    model.__class__ = Masked
    (site,) = [site for site in models.patch(model).sites if site.kind == "loss"]
    assert "makes the logits" in site.reason


def test_a_model_without_labels_has_no_loss() -> None:
    report = models.patch(build("llama").model)
    assert not [site for site in report.sites if site.kind == "loss"] and not report.left_alone
