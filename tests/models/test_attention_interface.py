"""attention=True: arguments besides q, k, v and a mask are computed, passed on, or rejected."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.errors import RtkError
from rtkernels.models import attention, chosen_keys

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, loss_and_gradients, tokens

HEADS, LENGTH, WIDTH = 2, 6, 16


def heads(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator).to(dtype) for _ in range(3))


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, position_bias: Tensor | None = None, softcap: float | None = None,
    gain: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = query.float() @ key.float().mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias.float()
    scores = scores if attention_mask is None else scores + attention_mask.float()
    probabilities = nn.functional.dropout(scores.softmax(-1), dropout) * (1.0 if gain is None else gain)
    return (probabilities @ value.float()).transpose(1, 2).to(query.dtype), probabilities


class Attention(nn.Module):
    """Its file has an attention of its own, which reads `gain`."""

    is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        return eager_attention_forward(self, x, x, x, None, 1.0)[0]


def _of_another_file() -> nn.Module:
    """Return a module whose file has no attention of its own."""

    class Other(nn.Module):
        is_causal = True

    Other.forward = types.FunctionType(Attention.forward.__code__, {})  # type: ignore[method-assign]
    return Other()


CAUSAL = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_of_the_models_own_attention(dtype: torch.dtype) -> None:
    q, k, v = heads(dtype)
    for extra in (
        {"gain": torch.tensor(3.0)},
        {"position_bias": torch.randn(1, HEADS, LENGTH, LENGTH).to(dtype)},
        {"softcap": 2.0},
    ):
        wanted, _ = eager_attention_forward(Attention(), q, k, v, CAUSAL, 0.25, **extra)
        result, _ = attention.attention_forward(Attention(), q, k, v, None, scaling=0.25, **extra)
        assert torch.allclose(result.float(), wanted.float(), rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5), (
            extra
        )
        plain, _ = attention.attention_forward(Attention(), q, k, v, None, scaling=0.25)
        assert (plain.float() - wanted.float()).abs().max() > 0.05  # it would show


def test_dropout_is_not_left_out() -> None:
    q, k, v = heads(torch.bfloat16)
    result, _ = attention.attention_forward(Attention(), q, k, v, None, scaling=0.25, softcap=2.0, dropout=0.9)
    plain, _ = attention.attention_forward(Attention(), q, k, v, None, scaling=0.25, softcap=2.0)
    assert (result.float() - plain.float()).abs().max() > 0.5
    with pytest.raises(RtkError, match=r"Other uses softcap, with dropout.*patch without attention="):
        attention.attention_forward(_of_another_file(), q, k, v, None, scaling=0.25, softcap=2.0, dropout=0.9)


def test_heads_that_ours_does_not_take_go_to_torch() -> None:
    q, k, v = heads(torch.bfloat16)
    assert attention._fits(q, k, v) and attention._fits(q, k[:, :1], v[:, :1])
    assert not attention._fits(q, k[:, :1], v)  # values of all heads, keys of groups
    assert not attention._fits(q, k, v[..., :12]) and not attention._fits(q[..., :12], k[..., :12], v)
    result, _ = attention.attention_forward(Attention(), q, k, v[..., :12], None, scaling=0.25)
    wanted, _ = eager_attention_forward(Attention(), q, k, v[..., :12], CAUSAL, 0.25)
    assert torch.allclose(result.float(), wanted.float(), rtol=0, atol=2e-2)


def test_position_bias_has_a_gradient() -> None:
    q, k, v = heads(torch.bfloat16)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[1, ..., 0] = False
    mask[..., 1] = True
    gradients = []
    for function in (attention.attention_forward, eager_attention_forward):
        leaf = bias.clone().requires_grad_()
        given = mask if function is attention.attention_forward else attention._added(mask, torch.float32)
        result, _ = function(Attention(), q, k, v, given, scaling=0.25, position_bias=leaf)
        (result.float() * v.transpose(1, 2).float().cos()).sum().backward()
        gradients.append(leaf.grad.float())
    assert (gradients[0] - gradients[1]).norm() <= 2e-2 * gradients[1].norm()


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_that_knows_names_is_left_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(chosen_keys, "ATTENTIONS", {})  # else these forms are known
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    model = build(kind, index_topk=4)
    wanted, gradients = loss_and_gradients(model, tokens())
    report = models.patch(model, attention=True)
    reasons = [site.reason for site in report.left_alone if site.kind == "attention"]
    assert len(reasons) == 1 and "does something else where the attention is not called" in reasons[0]
    loss, found = loss_and_gradients(model, tokens())
    assert loss == pytest.approx(wanted, rel=1e-5) and found.keys() == gradients.keys()


def test_parts_keep_what_they_had() -> None:
    """A part of a model may use another attention than the whole, one that does not know ours."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DetrForObjectDetection"):
        pytest.skip("not in this transformers")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 4}
    heads_of = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    config = transformers.DetrConfig(use_timm_backbone=False, backbone_config=backbone, **sizes, **heads_of)
    model = transformers.DetrForObjectDetection(config).eval()
    before = {id(c): name for c, name in attention._names_of(model).values()}
    assert len(set(before.values())) == 2  # the convolutions have no attention
    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(pixel_values=pixels).logits
        models.patch(model, attention=True)
        names = {id(c): name for c, name in attention._names_of(model).values()}
        assert all(names[key] == ("rtkernels" if name == "sdpa" else name) for key, name in before.items())
        assert torch.allclose(model(pixel_values=pixels).logits, wanted, rtol=0, atol=1e-5)
        models.unpatch(model)
        assert {id(c): name for c, name in attention._names_of(model).values()} == before
        assert torch.equal(model(pixel_values=pixels).logits, wanted)


def _prism() -> nn.Module:
    """Return an eager text model with a causal mask although its modules are not causal."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.VideoPrismTextConfig(vocab_size=64, max_position_embeddings=16, **sizes)
    torch.manual_seed(0)
    return transformers.models.videoprism.modeling_videoprism.VideoPrismTextModel(config).eval()


def test_a_causal_mask_of_modules_that_are_not_causal() -> None:
    pytest.importorskip("transformers.models.videoprism")
    model, given = _prism(), tokens(2, 9) % 64
    options = {"input_ids": given, "attention_mask": torch.ones_like(given)}
    with torch.no_grad():
        wanted = model(**options).last_hidden_state
        assert models.patch(model, attention=True).replaced["attention"] == 1
        assert torch.allclose(model(**options).last_hidden_state, wanted, rtol=0, atol=1e-4)
        models.unpatch(model)
        assert torch.equal(model(**options).last_hidden_state, wanted)


def test_code_that_reads_masks_gets_them() -> None:
    modelling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    assert attention._masked_name(object.__new__(modelling.Qwen4ExpTextModel), "sdpa") == attention.WHOLE
    modelling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    module = object.__new__(modelling.DeepseekV4Attention)  # it appends numbers to the mask
    assert [attention._masked_name(module, name) for name in ("sdpa", "eager")] == [attention.WHOLE, attention.ADDED]
    model = build("llama")
    assert not any(attention._masked_name(module, "sdpa") for module in model.modules())
    options = {"batch_size": 2, "q_length": 1, "kv_length": 5, "q_offset": 4, "kv_offset": 0}
    mask = attention.whole_mask(**options, device=torch.device("cpu"), dtype=torch.float32)
    assert mask is not None and mask.dtype == torch.bool and mask.shape == (2, 1, 1, 5)
    mask = attention.added_mask(**options, device=torch.device("cpu"), dtype=torch.float32)
    assert mask is not None and mask.dtype == torch.float32 and mask.shape == (2, 1, 1, 5)
