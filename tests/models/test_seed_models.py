"""BERT, Llama, LLaVA and DeepSeek-V3, which FlagGems is shown with, generate the same tokens on our kernels.

Greedy and with beams, under ``enable()``, patched, and both. Random weights; sizes that our kernels take on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.compare import running_on
from support.tiny_models import assert_greedy_tokens, largest_error, loss_and_gradients
from torch import Tensor, nn

import rtkernels
from rtkernels import models
from rtkernels.aten import table

pytest.importorskip("transformers", minversion="5.0")

NEW, VOCABULARY = 8, 256
TIE = 0.01  # of the largest logit, in fp16
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PATCH = {"attention": True, "fused_layers": True}
KINDS = ("bert", "llama", "llava", "deepseek_v3")
PLACES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def _without(*names: str) -> dict[str, int]:
    return {name: value for name, value in SIZES.items() if name not in names}


def build(kind: str) -> nn.Module:
    """Return a model in fp32 with random weights, the same at every call."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "bert":
        plain = _without("num_key_value_heads", "head_dim")
        model = hf.BertLMHeadModel(hf.BertConfig(**plain, is_decoder=True, hidden_dropout_prob=0.0))
    elif kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    elif kind == "llava":
        vision = hf.CLIPVisionConfig(
            hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=8, projection_dim=128,
        )  # fmt: skip
        config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**SIZES), image_token_index=255)
        model = hf.LlavaForConditionalGeneration(config)
        model.generation_config.pad_token_id = 0
    else:
        model = hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **_without("num_key_value_heads", "head_dim"), num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
                qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2,
                moe_intermediate_size=64, first_k_dense_replace=1, n_group=2, topk_group=1, n_shared_experts=1,
            )
        )  # fmt: skip
    for name, parameter in model.named_parameters():  # logits further apart than rounding, norms unlike ones
        parameter.data = torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data += 1
    return model.eval()


def inputs(kind: str, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return prompts without padding, and an image for each where the model takes one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY - 1, (2, 11), generator=generator)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "llava":
        ids[:, 1:5] = 255  # four patches
        given["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator).to(dtype)
    return {name: tensor.to(device) for name, tensor in given.items()}


@contextmanager
def _enabled() -> Iterator[None]:
    """Our operators for tensors of every size."""
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    try:
        with rtkernels.use("all"):
            yield
    finally:
        table.MIN_ELEMENTS.update(limits)


def _generated(model: nn.Module, given: dict[str, Tensor], beams: int) -> Tensor:
    return model.generate(**given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, num_beams=beams)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "beams"), ((torch.float32, 1), (torch.float32, 3), (torch.float16, 1)), ids=str)
@pytest.mark.parametrize("way", ("enable", "patch", "both"))
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.one_in(3)
def test_the_same_tokens(kind: str, way: str, beams: int, dtype: torch.dtype, place: str) -> None:
    if place == "cpu" and way != "patch":
        pytest.skip("enable() is for GPUs")
    model, given = build(kind).to(place, dtype), inputs(kind, place, dtype)
    wanted, plain = _generated(model, given, beams), build(kind).to(place, dtype)
    assert len(set(wanted[:, 11:].flatten().tolist())) > 2  # no model that repeats itself
    if way != "enable":
        assert models.patch(model, **PATCH).replaced
    with nullcontext() if way == "patch" else _enabled():
        for _ in range(2):  # the second call replays what it can
            _check_tokens(_generated(model, given, beams), wanted, model, plain, given)


def _check_tokens(got: Tensor, wanted: Tensor, model: nn.Module, plain: nn.Module, given: dict[str, Tensor]) -> None:
    """Compare tokens; in fp16, only logits that tie may part them, and logits are compared, too."""
    if plain.dtype == torch.float32:
        assert torch.equal(got, wanted)
        return
    rest = {name: tensor for name, tensor in given.items() if name not in ("input_ids", "attention_mask")}
    start = given["input_ids"].shape[1]
    assert got.shape == wanted.shape and torch.equal(got[:, :start], given["input_ids"])
    assert_greedy_tokens(got, plain, start, allowed=TIE, never=[SIZES["eos_token_id"]], **rest)
    every = rest | {"input_ids": got, "attention_mask": torch.ones_like(got)}
    mine, right = (m(**every).logits.float() for m in (model, plain))
    torch.testing.assert_close(mine, right, rtol=0, atol=TIE * float(right.abs().max()))


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_bert_fills_masks_with_the_same_tokens(place: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BertConfig(**_without("num_key_value_heads", "head_dim"), hidden_dropout_prob=0.0)
    model = hf.BertForMaskedLM(config).eval().to(place)
    given = inputs("bert", place, torch.float32)
    given["attention_mask"][0, -4:] = 0
    wanted = model(**given).logits
    if place == "cuda":
        with _enabled():
            torch.testing.assert_close(model(**given).logits, wanted, rtol=1e-4, atol=1e-5)
    models.patch(model, attention=True)
    got = model(**given).logits
    seen = given["attention_mask"].bool()
    torch.testing.assert_close(got[seen], wanted[seen], rtol=1e-4, atol=1e-5)
    assert torch.equal(got[seen].argmax(-1), wanted[seen].argmax(-1))


@pytest.mark.parametrize(
    ("place", "interleaved"),
    [("cpu", True), ("cpu", False), ("sm_90", True),
     *(pytest.param("cuda", form, marks=pytest.mark.gpu) for form in (True, False))],
)  # fmt: skip
def test_the_rotation_of_deepseek_is_one_op(interleaved: bool, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients, without a cache, and for the first tokens of one; later tokens run as before."""
    with running_on(place) as device:
        _check_rotation(interleaved, device, monkeypatch)


def _check_rotation(interleaved: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = build("deepseek_v3"), inputs("deepseek_v3", device, torch.float32)
    model.config.rope_interleave = interleaved
    model.to(device)
    ids = given["input_ids"]
    static = {"cache_implementation": "static", "disable_compile": True}  # Dynamo has no grouped products in fp32
    wanted = loss_and_gradients(model, ids)
    with torch.no_grad():
        tokens = [_generated(model, given, 1), _generated(model, given | static, 1)]
    calls, op = [], rtkernels.mla_rope
    monkeypatch.setattr(rtkernels, "mla_rope", lambda q, *a, **o: calls.append(q.shape[1]) or op(q, *a, **o))
    report = models.patch(model, **PATCH)
    assert not [site for site in report.left_alone if site.kind == "fused"], report
    got = loss_and_gradients(model, ids)
    assert calls == [11, 11] and abs(got[0] - wanted[0]) < 1e-5 and largest_error(got[1], wanted[1]) < 1e-4
    with torch.no_grad():
        assert torch.equal(_generated(model, given, 1), tokens[0]) and calls == [11] * 4
        assert torch.equal(_generated(model, given | static, 1), tokens[1])
        first = model(input_ids=ids[:, :6], use_cache=True)
        rest = model(input_ids=ids[:, 6:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(rest, model(input_ids=ids).logits[:, 6:], rtol=1e-4, atol=1e-4)


def test_another_latent_attention_is_left_alone() -> None:
    model = build("deepseek_v3")
    kind = type(model.model.layers[0].self_attn)
    changed = type(kind.__name__, (kind,), {"expand_kv": lambda self, kv, rot: kind.expand_kv(self, kv, rot)})
    model.model.layers[0].self_attn.__class__ = changed
    report = models.patch(model, **PATCH)
    assert [site.name for site in report.left_alone if site.kind == "fused"] == ["model.layers.0.self_attn"]
