"""attn_implementation="rtkernels" and experts_implementation="rtkernels", without patch."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.errors import RtkError
from rtkernels.models import attention, by_name

pytest.importorskip("transformers", minversion="5.0")

import transformers
from support.tiny_models import build, loss_and_gradients, tokens

pytestmark = pytest.mark.one_in(3)  # whole models: a second each

models.register()
patcher = sys.modules["rtkernels.models.patcher"]


def named(model: nn.Module, experts: bool = False) -> nn.Module:
    """Return a model of the same weights, built with our names."""
    names = {"attn_implementation": "rtkernels"} | ({"experts_implementation": "rtkernels"} if experts else {})
    other = type(model)._from_config(copy.deepcopy(model.config), **names)
    other.load_state_dict(model.state_dict())
    return other.to(model.dtype).train(model.training)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[k].float() - other[k].float()).norm() / (one[k].float().norm() + 1e-6)) for k in one)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with every call of our attention and our products of experts."""
    calls: list[str] = []
    for module, name in ((attention.rtkernels, "attention"), (attention.rtkernels, "moe_index")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _real=real, _name=name, **k: calls.append(_name) or _real(*a, **k))
    return calls


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_names_compute_the_same(kind: str, called: list[str]) -> None:
    model = build(kind).bfloat16()
    wanted, gradients = loss_and_gradients(model, tokens())
    assert not called
    ours = named(model, experts=kind != "qwen3")
    loss, found = loss_and_gradients(ours, tokens())
    assert called.count("attention") == 2 and ("moe_index" in called) == (kind != "qwen3")
    assert loss == pytest.approx(wanted, rel=1e-3) and found.keys() == gradients.keys()
    assert close(gradients, found) < 0.05
    assert models.report(ours) is None


@pytest.mark.slow
def test_a_named_model_is_patched() -> None:
    ours = named(build("qwen3_moe"), experts=True)
    wanted = loss_and_gradients(ours, tokens())[0]
    assert not models.patch(ours).left_alone
    assert loss_and_gradients(ours, tokens())[0] == pytest.approx(wanted, rel=1e-3)


def test_padding_and_generation() -> None:
    model = build("qwen3").bfloat16().eval()
    ours, ids = named(model), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        wanted, found = (m(**given).logits.float() for m in (model, ours))
    assert float((wanted - found)[mask.bool()].norm() / wanted[mask.bool()].norm()) < 2e-2
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(*(m.float().generate(**given, **options) for m in (model, ours)))


def test_a_name_changes_no_other_model() -> None:
    model = build("qwen3")
    assert model.config._attn_implementation != "rtkernels"
    wanted = loss_and_gradients(model, tokens())[0]
    named(model)
    models.register()
    assert loss_and_gradients(model, tokens())[0] == wanted


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_attention_that_knows_names_is_rejected(kind: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    model = build(kind, index_topk=4)
    model.set_attn_implementation("rtkernels")
    with pytest.raises(RtkError, match=r'attn_implementation="rtkernels": .*Attention is in a file whose code'):
        model(input_ids=tokens())


def test_patched_models_and_names_in_one_process() -> None:
    """patch accepts a model after looking at the whole of it, and does not remove the check of others."""
    model = build("qwen3").bfloat16()
    models.patch(model, attention=True)
    functions = transformers.AttentionInterface()
    assert functions["rtkernels"] is by_name.attention_by_name
    assert attention.is_accepted(model.model.layers[0].self_attn)
    assert attention.is_accepted(copy.deepcopy(model).model.layers[0].self_attn)
    models.unpatch(model)
    assert not any(map(attention.is_accepted, model.modules()))


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_patched_model_accepts_no_other_of_its_class(kind: str) -> None:
    """One process, patched first: the other model is refused as if it were alone, before and after."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    patched, other = build(kind, index_topk=4), build(kind, index_topk=4)
    patched.set_attn_implementation("rtkernels")  # a name that its code does not ask for
    attention.replace_attention(patched)
    other.set_attn_implementation("rtkernels")
    with pytest.raises(RtkError, match=r'attn_implementation="rtkernels": .*Attention is in a file whose code'):
        other(input_ids=tokens())
    assert attention.is_accepted(patched.model.layers[0].self_attn)


def test_a_paged_cache_is_rejected() -> None:
    q = torch.randn(1, 2, 4, 16).bfloat16()
    with pytest.raises(RtkError, match="continuous batching"):
        by_name.attention_by_name(nn.Module(), q, q, q, None, cache=object())


# ---- experts --------------------------------------------------------------------------------------------------------


def experts(kind: str = "qwen3_moe") -> nn.Module:
    model = build(kind, num_hidden_layers=1)
    (found,) = (m for m in model.modules() if hasattr(m, "_apply_gate"))
    found.config._experts_implementation = "rtkernels"
    return found


def test_indices_equal_to_the_number_of_experts_are_skipped() -> None:
    layer = experts()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 8], [3, 1], [8, 8], [2, 7], [8, 5]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    wanted = torch.zeros_like(x)
    with torch.no_grad():
        for row, column in (index < 8).nonzero().tolist():
            both = x[row] @ layer.gate_up_proj[index[row, column]].T
            inner = nn.functional.silu(both[:32]) * both[32:]
            wanted[row] += weights[row, column] * (inner @ layer.down_proj[index[row, column]].T)
        result = layer(x, index, weights)
    assert torch.allclose(result, wanted, rtol=0, atol=1e-5) and result[2].abs().max() == 0


def test_layers_are_recognised_once_and_copies_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    real = by_name.experts.recognize
    monkeypatch.setattr(by_name.experts, "recognize", lambda m: tried.append(m) or real(m))
    monkeypatch.setattr(patcher, "_answers", {})
    ours = named(build("qwen3_moe"), experts=True).eval()
    with torch.inference_mode():
        wanted = ours(input_ids=tokens()).logits
        assert len(tried) == 1  # of two layers
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(other(input_ids=tokens()).logits, wanted)


def test_experts_that_are_not_ours_are_rejected() -> None:
    layer = experts()
    layer.act_fn = nn.Softplus()
    with pytest.raises(RtkError, match=r'experts_implementation="rtkernels": .*none of our activations.*grouped_mm'):
        layer(torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    with pytest.raises(RtkError, match="serve_fp8"):
        by_name._refuse_codes(layer)


@pytest.mark.slow
def test_a_first_call_inside_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patcher, "_answers", {})
    ours = named(build("qwen3_moe", num_hidden_layers=1).bfloat16(), experts=True).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(ours, backend="eager", fullgraph=True)(input_ids=tokens(), use_cache=False).logits
        wanted = ours(input_ids=tokens(), use_cache=False).logits
    assert float((result - wanted).float().norm()) <= 2e-2 * float(wanted.float().norm())
