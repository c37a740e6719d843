"""patch(fused_layers=True): same loss and gradients, separate parameters; an unknown forward is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rtkernels import models
from rtkernels.models import fp8 as quantized
from rtkernels.models import fused_layers, merged, reuse

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

# Fused decoder layers, attentions and MLPs of the two layers of a model.
WHOLE = {"llama": 6, "qwen3": 6, "qwen2": 6, "mistral": 6, "granite": 6, "qwen3_moe": 4, "mixtral": 4, "gpt_oss": 4}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "granite", "qwen3_moe")]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "mixtral", "glm4", "gpt_oss", *SLOW])
def test_loss_and_gradients_stay(kind: str) -> None:
    model = build(kind)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model, fused_layers=True)
    fused_loss, fused_gradients = loss_and_gradients(model)
    assert fused_loss == pytest.approx(loss, rel=1e-5) and largest_error(fused_gradients, gradients) <= 1e-5
    if kind == "glm4":  # a norm after each part of a layer: known attention, unknown layer
        assert report.replaced["fused"] == 2
        assert {site.module for site in report.left_alone} == {"Glm4DecoderLayer"}
    else:
        assert report.replaced["fused"] == WHOLE[kind] and not report.left_alone, str(report)
    models.unpatch(model)
    assert loss_and_gradients(model)[0] == loss


def test_what_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.patched(lambda: build("qwen3"), fused_layers=True)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert merged.adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    assert merged.adjacent([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
    called = []
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: called.append(self) or own(self, x))
    model(input_ids=tokens())
    assert called == [layer.self_attn.o_proj for layer in model.model.layers]  # down_proj is part of the MLP


def test_v_is_kept_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.patched(lambda: build("qwen3"), fused_layers=True)
    own, found = fused_layers.normed_heads, []

    def apply(qkv, *args):
        heads = own(qkv, *args)
        found.extend(t.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for t in heads)
        return heads

    monkeypatch.setattr(fused_layers, "normed_heads", apply)
    loss_and_gradients(model)
    assert found == [False, False, True] * 2


def test_weights_that_are_not_adjacent_give_the_same() -> None:
    model = models.patched(lambda: build("qwen2"), fused_layers=True)  # with biases
    loss, gradients = loss_and_gradients(model)
    other = copy.deepcopy(model)
    attention = other.model.layers[0].self_attn
    assert merged.adjacent([attention.q_proj.weight, attention.k_proj.weight]) is None
    other_loss, others = loss_and_gradients(other)
    assert other_loss == pytest.approx(loss, rel=1e-6) and largest_error(others, gradients) <= 1e-5


def test_a_merged_product_can_be_changed_in_place() -> None:
    linears = [nn.Linear(16, n, bias=False) for n in (8, 24)]
    x = torch.randn(2, 3, 16, requires_grad=True)
    y, wanted = merged.merged(x, linears), torch.cat([linear(x) for linear in linears], -1) + 1
    y += 1
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (y, wanted)))


def test_frozen_weights_hooks_and_adapters() -> None:
    model = build("qwen3")
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj, nn.Identity())
    seen = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda module, given, output: seen.append(output.shape)
    )
    loss, gradients = loss_and_gradients(model)
    models.patch(model, fused_layers=True)
    same_loss, same = loss_and_gradients(model)
    assert same_loss == pytest.approx(loss, rel=1e-6) and largest_error(same, gradients) <= 1e-5
    assert len(seen) == 2


def test_a_changed_forward_is_left_alone() -> None:
    model = build("llama")
    layer = model.model.layers[0]

    class LlamaDecoderLayer(type(layer)):  # as a later transformers may have it
        def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
            mixed, _ = self.self_attn(
                hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask,
                position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
            hidden_states = hidden_states + 0.5 * mixed
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    layer.__class__ = LlamaDecoderLayer
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model, fused_layers=True)
    (site,) = report.left_alone
    assert site.kind == "fused" and site.name == "model.layers.0" and "none that is known here" in site.reason
    same_loss, same = loss_and_gradients(model)
    assert same_loss == pytest.approx(loss, rel=1e-6) and largest_error(same, gradients) <= 1e-5


def test_the_hash_is_of_the_code_alone() -> None:
    def forward(self, x: int) -> int:
        """Add."""
        # a remark
        total: int = x + 1
        return total

    one = forward

    def forward(self, x: float):
        total: float = x + 1
        return total

    other = forward

    def forward(self, x):
        total: int = x + 2
        return total

    forms = [fused_layers.form_of(function) for function in (one, other, forward)]
    assert all(forms) and forms[0] == forms[1] != forms[2]
    assert fused_layers.form_of(len) == ""


def test_generate_and_checkpoints(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = build("qwen3").eval()
    prompt = tokens(2, 9)
    wanted = model.generate(prompt, max_new_tokens=5, do_sample=False)
    models.patch(model, fused_layers=True)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), wanted)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    model.train()
    loss, gradients = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same_loss, same = loss_and_gradients(model, use_cache=False)
    assert same_loss == loss and largest_error(same, gradients) <= 1e-6


def test_in_bfloat16_no_worse_than_before() -> None:
    exact = loss_and_gradients(build("qwen3"))[1]
    model = build("qwen3").bfloat16()
    plain = loss_and_gradients(model)[1]
    models.patch(model, fused_layers=True)
    fused = loss_and_gradients(model)[1]

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return float(sum((gradients[n].float() - g).pow(2).sum() for n, g in exact.items()))

    assert error(fused) <= 1.05**2 * error(plain)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_with_fp8(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 128, "num_hidden_layers": 1}
    results = []
    for fused in (False, True):
        model = models.patched(lambda: build(kind, **sizes).bfloat16(), fp8=True, fused_layers=fused)
        results.append(loss_and_gradients(model))
    (loss, gradients), (fused_loss, fused_gradients) = results
    assert fused_loss == pytest.approx(loss, rel=2e-3)
    assert fused_gradients.keys() == gradients.keys()
    first, second = (torch.cat([g.flatten().double() for g in x.values()]) for x in (gradients, fused_gradients))
    assert float(nn.functional.cosine_similarity(first, second, dim=0)) >= 0.998


@pytest.mark.slow
def test_one_graph_under_compile() -> None:
    """Under torch.compile products stay separate; sums with norms do not, and nothing breaks the graph."""
    model = models.patched(lambda: build("qwen3", num_hidden_layers=1), fused_layers=True)
    loss, gradients = loss_and_gradients(model, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same_loss, same = loss_and_gradients(compiled, use_cache=False)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert largest_error({n.removeprefix("_orig_mod."): g for n, g in same.items()}, gradients) <= 1e-5


@pytest.mark.slow
def test_fp8_under_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = models.patched(lambda: build("qwen3", num_hidden_layers=1).bfloat16(), fp8=True, fused_layers=True)
    loss, _ = loss_and_gradients(model, use_cache=False)
    monkeypatch.setattr(reuse, "_stand_ins", {})  # as in a process that has not called the model before
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert loss_and_gradients(compiled, use_cache=False)[0] == pytest.approx(loss, rel=1e-2)
