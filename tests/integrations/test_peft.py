"""LoRA on the fp8 layers of serve_fp8."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from rtkernels import models
from rtkernels.errors import ArgumentError, RtkError

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")

import peft
from support.tiny_models import build, loss_and_gradients, tokens

from rtkernels.integrations.peft import ServedLora, served_lora
from rtkernels.models.served import ServedExperts, ServedLinear

pytestmark = pytest.mark.one_in(3)  # whole models: a second each

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
    "moe_intermediate_size": 128, "num_experts": 4,
}  # fmt: skip


def served(kind: str = "qwen3") -> nn.Module:
    return models.serve_fp8(build(kind, **SIZES).bfloat16())


def dequantized(model: nn.Module) -> nn.Module:
    """Return the same model with linear layers of the 16-bit values of its codes."""
    from rtkernels import dequantize_fp8

    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, ServedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, dtype=torch.bfloat16)
            plain.weight.data = dequantize_fp8(module.weight, module.weight_scale_inv, granularity="block")
            path, _, child = name.rpartition(".")
            setattr(model.get_submodule(path), child, plain.requires_grad_(False))
    return model


def config(**options: object) -> peft.LoraConfig:
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return peft.LoraConfig(**options)


def with_adapters(model: nn.Module, given: peft.LoraConfig) -> nn.Module:
    torch.manual_seed(3)
    return peft.get_peft_model(model, given).train()


def test_peft_alone_rejects_them() -> None:
    with pytest.raises(ValueError, match=r"ServedLinear.*is not supported"):
        peft.get_peft_model(served(), config())


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_adapters(fused: bool) -> None:
    """Those of the first layer arrive through layers without adapters, and through those that patch fuses."""
    model = served()
    plain = with_adapters(dequantized(model), config())
    wanted, gradients = loss_and_gradients(plain, tokens(2, 20))
    if fused:
        models.patch(model, fused_layers=True)
    ours = with_adapters(model, served_lora(config()))
    assert sum(isinstance(m, ServedLora) for m in ours.modules()) == 4
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    loss, found = loss_and_gradients(ours, tokens(2, 20))
    assert loss == pytest.approx(wanted, rel=1e-2) and found.keys() == gradients.keys() and len(found) == 8
    for name, gradient in gradients.items():
        similar = nn.functional.cosine_similarity(gradient.flatten().float(), found[name].flatten().float(), dim=0)
        assert float(similar) > 0.97, name


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    ours = with_adapters(served(), served_lora(config())).eval()
    ours.save_pretrained(tmp_path)
    given = served_lora(peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(served(), tmp_path, config=given).eval()
    with torch.no_grad():
        assert torch.equal(ours(input_ids=tokens()).logits, again(input_ids=tokens()).logits)
        with ours.disable_adapter():
            assert not torch.equal(ours(input_ids=tokens()).logits, again(input_ids=tokens()).logits)
    with pytest.raises(RtkError, match=r"merge_and_unload\(\) there.*export_fp8"):
        ours.merge_and_unload()


def test_what_needs_the_weight_is_rejected() -> None:
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"target_parameters": ["down_proj"]}):
        with pytest.raises(ArgumentError, match=f"config.{next(iter(options))} is"):
            served_lora(config(**options))
    with pytest.raises(ArgumentError, match="config is a dict"):
        served_lora({})


def test_experts_have_no_gradients() -> None:
    ours = with_adapters(served("qwen3_moe"), served_lora(config()))
    assert any(isinstance(m, ServedExperts) for m in ours.modules())
    with torch.no_grad():
        ours(input_ids=tokens())
    with pytest.raises(RtkError, match="fp8 experts of serve_fp8 have no gradients"):
        ours(input_ids=tokens(), labels=tokens())
