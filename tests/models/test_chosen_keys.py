"""DeepSeek's sparse attention in patched models: the choice of keys, latents in place of expanded keys, decoding."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.23")

import rtkernels
from rtkernels import models
from rtkernels.models import chosen_keys

NAMES = ("DeepseekV32", "GlmMoeDsa")


def build(name: str, **changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    options = {
        "vocab_size": 120, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "kv_lora_rank": 40,
        "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 32, "index_topk": 5,
        "index_head_dim": 32, "index_n_heads": 6, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    } | changes  # fmt: skip
    if name == "GlmMoeDsa":
        options |= {"indexer_types": ["full", "shared", "full"]}
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():  # far from ties of scores and of logits
            if p.dim() > 1:
                p.mul_(4)
    return model.bfloat16().eval()


def patched(model: nn.Module, **options: Any) -> models.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return models.patch(model, **options)


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 119, shape, generator=torch.Generator().manual_seed(1))


def inputs_of_attention(model: nn.Module, tokens: Tensor, **more: Any) -> list[tuple[nn.Module, dict[str, Any], Any]]:
    """Return each attention of a model with its arguments and result in a forward pass."""
    found = []

    def seen(module: nn.Module, args: Any, named: dict[str, Any], result: Any) -> None:
        found.append((module, named, result))

    hooks = [m.register_forward_hook(seen, with_kwargs=True) for m in model.modules() if chosen_keys.is_known(m)]
    with torch.no_grad():
        model(tokens, use_cache=False, **more)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_attention_over_latents(name: str, padded: bool) -> None:
    """Of prompts longer than the choice; with left padding, the first rows have fewer keys than are chosen."""
    model, tokens = build(name), ids(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 1 - int(padded)
    given = inputs_of_attention(model, tokens, attention_mask=mask)
    assert patched(model, norm=False, rope=False, attention=True).replaced["attention"] == 3
    assert all(type(m)._rtkernels_kind.kind == "chosen_keys" for m, _, _ in given)
    with mock.patch.object(rtkernels, "sparse_mla", wraps=rtkernels.sparse_mla) as called, torch.no_grad():
        for module, named, want in given:
            got = module(**named)
            rows = mask.bool()
            close = (got[0] - want[0]).float().norm(dim=-1) <= 0.03 * want[0].float().norm(dim=-1)
            assert close[rows].float().mean() > 0.97  # near ties of scores
            assert len(got) == len(want)
            if len(want) > 2:
                same = [set(a.tolist()) == set(b.tolist()) for a, b in zip(got[2][rows], want[2][rows], strict=True)]
                assert sum(same) > 0.85 * len(same)  # masked keys are any of those that are left
    assert called.call_count == 3


@pytest.mark.parametrize("name", NAMES)
def test_decoding(name: str) -> None:
    """Steps read latents; their logits are those of the unpatched model behind the same tokens, in fp32."""
    model, tokens = build(name), ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    unpatched = copy.deepcopy(model).float()
    patched(model, attention=True)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True}
    with mock.patch.object(rtkernels, "sparse_mla", wraps=rtkernels.sparse_mla) as called:
        found = model.generate(tokens, attention_mask=mask, return_dict_in_generate=True, **options)
    assert called.call_count >= 5 * 3
    whole = torch.cat((mask, mask.new_ones(2, 6)), 1)
    with torch.no_grad():
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        want = unpatched(found.sequences, attention_mask=whole, position_ids=positions).logits[:, 11:-1]
    got = torch.stack(found.logits, 1)
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() < 0.05  # a key near a tie may be another one


def test_gradients_are_those_of_the_model() -> None:
    """With gradients, the model's own attention runs with the keys of our indexer."""
    model, tokens = build("DeepseekV32", index_topk=64), ids(2, 20)
    plain = copy.deepcopy(model)
    for one, attention in ((model, True), (plain, None)):
        patched(one.train(), attention=attention)
        one(tokens, labels=tokens).loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_calls_that_are_left_to_the_model() -> None:
    model, tokens = build("DeepseekV32"), ids(1, 40)
    given = inputs_of_attention(model, tokens)
    patched(model, norm=False, rope=False, attention=True)
    module, named, want = given[1]
    with mock.patch.object(rtkernels, "sparse_mla", side_effect=AssertionError), torch.no_grad():
        module.float()
        as_floats = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in named.items()}
        as_floats["position_embeddings"] = tuple(t.float() for t in named["position_embeddings"])
        assert module(**as_floats)[0].dtype == torch.float32
        module.bfloat16()
        handle = module.kv_b_proj.register_forward_hook(lambda *_: None)
        assert torch.equal(module(**named)[0][:, 4], want[0][:, 4])
        handle.remove()
        short = {"hidden_states": named["hidden_states"][:, :5], "attention_mask": named["attention_mask"][..., :5, :5]}
        tables = tuple(t[:, :5] for t in named["position_embeddings"])
        assert torch.equal(module(**{**named, **short, "position_embeddings": tables})[0], want[0][:, :5])


def test_other_forms_keep_their_reason() -> None:
    model = build("DeepseekV32")
    with mock.patch.dict(chosen_keys.ATTENTIONS, clear=True):
        report = patched(model, attention=True)
    assert not report.replaced["attention"]
    assert any("does something else where the attention is not called" in s.reason for s in report.left_alone)
    with mock.patch.dict(chosen_keys.INDEXERS, clear=True):
        models.unpatch(model)
        report = patched(model, attention=True)
    reasons = {site.reason for site in report.left_alone if site.kind == "attention"}
    assert reasons == {"the forward of its indexer is none that is known here"}


def test_unpatched_again() -> None:
    model, tokens = build("DeepseekV32"), ids(2, 40)
    with torch.no_grad():
        want = model(tokens).logits
        patched(model, attention=True)
        assert not torch.equal(model(tokens).logits, want)
        models.unpatch(model)
        assert torch.equal(model(tokens).logits, want)
