"""Models with sinks, for which transformers has eager attention only: `patch` replaces it by default."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import assert_greedy_tokens
from torch import nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "vocab_size": 200,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ALLOWED = 0.02  # of the largest logit
EVERY_EXPERT = {"num_experts_per_tok": SIZES["num_local_experts"]}  # no choice that roundings could change
IDS = torch.randint(2, 200, (2, 24), generator=torch.Generator().manual_seed(0))


def build(kind: str = "gpt_oss", attention: str = "eager", **more: object) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # zeros at first
            parameter.data = torch.randn_like(parameter) + 3
        elif "v_proj" in name or "o_proj" in name:  # so that attention is a good part of the result
            parameter.data *= 10
    return model


def test_sinks_by_default() -> None:
    model, own = build(**EVERY_EXPERT), build(**EVERY_EXPERT)
    report = models.patch(model)
    assert report.replaced["attention"] == 1 and "attention" in report.asked and not report.left_alone
    assert model.config._attn_implementation == "rtkernels"
    with torch.no_grad():
        wanted, got = (m(input_ids=IDS).logits for m in (own, model))
    torch.testing.assert_close(got, wanted, rtol=0, atol=ALLOWED * float(wanted.abs().max()))
    assert models.patch(model) is report  # with the same options
    models.unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_attention_weights_are_those_of_the_model() -> None:
    """A call with `output_attentions` runs the model's own attention, whose weights ours does not compute."""
    model, own = build(), build()
    models.patch(model)
    with torch.no_grad():
        wanted, got = (m(input_ids=IDS, output_attentions=True).attentions for m in (own, model))
    assert len(got) == len(wanted) == 2
    torch.testing.assert_close(got, wanted, rtol=0, atol=0.02)


def test_generate_is_not_captured_by_default() -> None:
    model, own = build(**EVERY_EXPERT), build(**EVERY_EXPERT)
    report = models.patch(model)
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    got = model.generate(IDS[:1, :6], **given)
    assert got.shape == (1, 10) and torch.equal(got[:, :6], IDS[:1, :6])
    assert_greedy_tokens(got, own, 6, allowed=ALLOWED, never=[own.config.eos_token_id])
    assert not report.captures and not report.not_captured


@pytest.mark.parametrize(
    ("kind", "options"), [("gpt_oss", {"attention": False}), ("llama", {}), ("mistral", {}), ("gemma2", {})]
)
def test_left_alone(kind: str, options: dict[str, bool]) -> None:
    model = build(kind)
    report = models.patch(model, **options)
    assert not report.replaced["attention"] and "attention" not in report.asked
    assert model.config._attn_implementation == "eager"


def test_who_wants_attention_weights_keeps_eager() -> None:
    assert not models.patch(build(output_attentions=True)).replaced["attention"]
