"""Unmodified models of transformers, forward and backward, on our operators: same loss, same gradients.

In the emulator, in fp32, with the smallest sizes; it compiles many kernels for the host, so only ``--full`` runs it.
"""

from __future__ import annotations

import pytest
import torch
from support.places import emulated

import rtkernels
from rtkernels.aten import table

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
# Overloads that each model calls and that must be taken, by our kernels for all calls in fp32.
EXPECTED = {
    "bert": {"add.Tensor", "gelu", "gelu_backward"},
    "llama": {"mul.Tensor", "add.Tensor", "rsqrt", "silu", "silu_backward", "neg", "cat", "cos", "sin"},
    "llava": {"mul.Tensor", "add.Tensor", "silu", "cat"},
}


def _bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    tokens = torch.randint(1, 64, (2, 9))
    return model, {"input_ids": tokens, "labels": tokens}


def _llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.randint(1, 64, (2, 9))
    return LlamaForCausalLM(LlamaConfig(**SIZES)), {"input_ids": tokens, "labels": tokens}


def _llava() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=32,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES), image_token_index=63)
    tokens = torch.randint(1, 60, (1, 10))
    tokens[:, 1:5] = 63  # four patches
    return LlavaForConditionalGeneration(config), {
        "input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(1, 3, 16, 16),
    }  # fmt: skip


def _step(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _compare(name: str, device: str) -> None:
    torch.manual_seed(0)
    model, inputs = {"bert": _bert, "llama": _llama, "llava": _llava}[name]()
    model, inputs = model.to(device), {key: value.to(device) for key, value in inputs.items()}
    want_loss, want = _step(model, inputs)
    rtkernels.aten.reset()
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    try:
        with rtkernels.use("all"):
            loss, gradients = _step(model, inputs)
    finally:
        table.MIN_ELEMENTS.update(limits)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == want.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, want[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    rtkernels.report()
    taken = {row["overload"] for row in rtkernels.report(as_rows=True) if row["ours"]}
    assert EXPECTED[name] <= taken


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("name", ("bert", "llama", "llava"))
def test_model(name: str) -> None:
    pytest.importorskip("transformers")
    with rtkernels.emulate("sm_80"):
        _compare(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("bert", "llama", "llava"))
def test_model_on_the_gpu(name: str) -> None:
    pytest.importorskip("transformers")
    _compare(name, "cuda")
