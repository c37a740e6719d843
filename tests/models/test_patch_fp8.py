"""patch(fp8=...) and patch(attention=True): close to the original model, codes computed once, everything released."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels import models
from rtkernels.errors import ArgumentError
from rtkernels.models import fp8 as quantized
from rtkernels.models import fp8_linear
from rtkernels.nn import fp8_experts

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, loss_and_gradients, tokens


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    first, second = (torch.cat([g.flatten().double() for g in x.values()]) for x in (a, b))
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))


@pytest.mark.parametrize("recipe", [True, "row", "tensor"])
@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_fp8_is_close(kind: str, recipe: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = build(kind).bfloat16()
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model, fp8=recipe)
    fp8_loss, fp8_gradients = loss_and_gradients(model)
    assert report.replaced["fp8"] == (14 if kind == "qwen3" else 8), str(report)
    assert fp8_gradients.keys() == gradients.keys()
    assert fp8_loss == pytest.approx(loss, rel=1e-2) and fp8_loss != loss
    assert cosine(fp8_gradients, gradients) >= 0.99
    models.unpatch(model)
    assert loss_and_gradients(model)[0] == loss


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])  # qwen2 has biases of q, k and v
def test_one_step_of_the_graph_has_the_bits_of_fp8_linear(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}

    def run_step(**recipe: Any) -> tuple[float, dict[str, Tensor]]:
        model = build(kind, intermediate_size=128, **sizes).bfloat16()
        models.patch(model, fp8=models.Fp8Recipe(**recipe), fused_layers=True)
        return loss_and_gradients(model, tokens(2, 16))

    steps, own = [], fp8_linear.products.linear
    monkeypatch.setattr(fp8_linear.products, "linear", lambda *args: steps.append(args) or own(*args))
    found = [run_step(), run_step(save_weight=True)]
    assert len(steps) == 8  # q, k, v as one and the output projection, of two layers, two times
    frozen = build(kind, intermediate_size=128, **sizes).bfloat16()
    models.patch(frozen, fp8=True, fused_layers=True)
    for name, p in frozen.named_parameters():
        p.requires_grad_("norm" in name)
    assert all(torch.equal(found[0][1][name], g) for name, g in loss_and_gradients(frozen, tokens(2, 16))[1].items())
    monkeypatch.setattr(fp8_linear, "_as_step", lambda *args: None)
    loss, gradients = run_step()
    for other, others in found:
        assert other == loss and all(torch.equal(others[name], g) for name, g in gradients.items())


def test_experts_keep_codes_of_fixed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe").bfloat16()
    models.patch(model, fp8=True)
    wanted = loss_and_gradients(model)
    own, coded = quantized.weight_codes, []
    for module in (quantized, fp8_experts):
        monkeypatch.setattr(module, "weight_codes", lambda w, *args: coded.append(w) or own(w, *args))
    with rtkernels.nn.fixed_weights(model):
        for _ in range(2):
            loss, gradients = loss_and_gradients(model)
            assert loss == wanted[0] and all(torch.equal(gradients[name], g) for name, g in wanted[1].items())
    assert len(coded) == 4  # two weights in each of two layers


def test_codes_are_made_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = models.patched(lambda: build("qwen3").bfloat16(), fp8=True)
    calls = []

    def count(name: str, where: Any = rtkernels) -> None:
        op = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, **options: calls.append(name) or op(*args, **options))

    for name in ("rms_norm_fp8", "glu_fp8", "rms_norm"):
        count(name)
    count("_quantize", fp8_linear)
    loss_and_gradients(model)
    # In each layer: norms for q, k, v and for gate, up; the output projection; the down projection. Norms of q and k
    # heads, and the last norm, give numbers: nothing was normalised to be quantised.
    assert Counter(calls) == {"rms_norm_fp8": 4, "_quantize": 2, "glu_fp8": 2, "rms_norm": 5}


def test_recipes_have_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    loss = loss_and_gradients(build("qwen3").bfloat16())[0]
    recipes = [
        models.Fp8Recipe(save_weight=True),
        models.Fp8Recipe(wgrad="bf16", skip=("layers.0.", "o_proj")),
        models.Fp8Recipe(pow2_scale=True),
    ]
    for recipe in recipes:
        model = build("qwen3").bfloat16()
        report = models.patch(model, fp8=recipe)
        assert report.replaced["fp8"] == (6 if recipe.skip else 14)
        assert loss_and_gradients(model)[0] == pytest.approx(loss, rel=1e-2)
    with pytest.raises(ArgumentError, match="fp8 has wgrad 'fp4'; expected 'fp8' or 'bf16'"):
        models.patch(build("qwen3"), fp8=models.Fp8Recipe(wgrad="fp4"))


def test_weights_are_quantised_one_time_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = models.patched(lambda: build("qwen3").bfloat16(), fp8=True, fused_layers=True)
    wanted = [loss_and_gradients(model, tokens(seed=i))[1] for i in range(2)]
    calls, make = [], rtkernels.fp8_weight
    monkeypatch.setattr(rtkernels, "fp8_weight", lambda w, **options: calls.append(w.shape) or make(w, **options))
    with rtkernels.nn.fixed_weights(model):
        for i in range(2):
            got = loss_and_gradients(model, tokens(seed=i))[1]
            assert all(torch.equal(got[name], g) for name, g in wanted[i].items())
    assert len(calls) == 14  # each weight; in the tiny model none is a multiple of 128 rows, so none are merged


def test_experts_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = build("qwen3_moe").bfloat16()
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model, fp8=True)
    assert report.replaced["fp8"] == 2 * 4 + 2, str(report)
    fp8_loss, fp8_gradients = loss_and_gradients(model)
    assert fp8_loss == pytest.approx(loss, rel=1e-2) and cosine(fp8_gradients, gradients) >= 0.98


def test_hooks_of_projections_get_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = models.patched(lambda: build("qwen3", num_hidden_layers=1).bfloat16(), fp8=True)
    other = copy.deepcopy(model)
    loss = loss_and_gradients(other)[0]
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    seen = []
    attention.k_proj.register_forward_pre_hook(lambda module, given: seen.append(type(given[0])))
    mlp.up_proj.register_forward_hook(lambda module, given, output: seen.append(type(given[0])))
    assert loss_and_gradients(model)[0] == pytest.approx(loss, rel=1e-3) and seen == [Tensor, Tensor]
    mlp.down_proj.register_forward_hook(lambda module, given, output: seen.append(type(given[0])))
    assert loss_and_gradients(model)[0] == pytest.approx(loss, rel=1e-3) and len(seen) == 5
    names = [name for name, _ in model.named_parameters()]
    models.unpatch(model)
    assert names == [name for name, _ in model.named_parameters()]
    assert not any(quantized.READERS in module.__dict__ for module in model.modules())


def test_small_layers_and_the_head_are_left_alone() -> None:
    model = build("qwen3")
    report = models.patch(model, fp8=True)
    assert report.replaced["fp8"] == 0
    assert {site.reason for site in report.left_alone if site.kind == "fp8"} == {
        "64 x 64 is too small to gain from fp8", "32 x 64 is too small to gain from fp8",
        "96 x 64 is too small to gain from fp8", "64 x 96 is too small to gain from fp8",
    }  # fmt: skip
    assert not any("lm_head" in site.name for site in report.sites)
    with pytest.raises(ArgumentError, match="fp8 is 'int8'; expected True or one of 'block', 'row', 'tensor'"):
        models.patch(build("qwen3"), fp8="int8")


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
def test_attention_is_close(kind: str) -> None:
    model = build(kind).bfloat16()
    before = model.config._attn_implementation
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model, attention=True)
    assert report.replaced["attention"] == 1 and model.config._attn_implementation == "rtkernels"
    our_loss, our_gradients = loss_and_gradients(model)
    assert our_loss == pytest.approx(loss, rel=5e-3) and cosine(our_gradients, gradients) >= 0.99
    models.unpatch(model)
    assert model.config._attn_implementation == before


def test_padding_is_masked() -> None:
    model = build("qwen3").bfloat16().eval()
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    wanted = model(input_ids=ids, attention_mask=mask).logits
    models.patch(model, attention=True)
    got = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(got[0, 3:].float(), wanted[0, 3:].float(), atol=0.1)
    assert torch.allclose(got[1].float(), wanted[1].float(), atol=0.1)


def _saved_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of activations that a step saves for its backward pass, each memory one time."""
    memory, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            memory[storage.data_ptr()] = storage.nbytes()
        return t

    ids = tokens(2, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model.model(input_ids=ids, use_cache=False)
        found = sum(memory.values())
    del out
    return found


def test_what_is_saved_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed codes take the place of the 16-bit inputs of projections, one time for those that share them."""
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 128, "num_hidden_layers": 1}
    plain, patched, fp8 = (
        models.patched(lambda: build("qwen3", **sizes).bfloat16(), loss=False, **options)
        if options is not None
        else build("qwen3", **sizes).bfloat16()
        for options in (None, {"fused_layers": True}, {"fp8": models.Fp8Recipe(save_weight=True), "fused_layers": True})
    )
    own, ours, codes = _saved_bytes(plain), _saved_bytes(patched), _saved_bytes(fp8)
    assert ours < 0.7 * own and codes < 0.92 * ours, (own, ours, codes)


def test_layers_that_are_one_product_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 60)  # 64 x 128 is too small, 128 + 64 + 64 rows are not
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    for fused, left in ((False, {"k_proj", "v_proj"}), (True, set())):
        report = models.patch(build("qwen3", **sizes), fp8=True, fused_layers=fused)
        assert {site.name.rpartition(".")[2] for site in report.left_alone} == left, str(report)


@pytest.mark.parametrize("kind", ["glm_moe_dsa"])
def test_a_norm_is_read_without_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer of a sparse attention reads the norm's result under no_grad, next to projections with gradients."""
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = build(kind, index_topk=4).bfloat16()
    loss, gradients = loss_and_gradients(model)
    models.patch(model, fp8=True)
    fp8_loss, fp8_gradients = loss_and_gradients(model)
    assert fp8_loss == pytest.approx(loss, rel=1e-2) and fp8_gradients.keys() == gradients.keys()
    assert cosine(fp8_gradients, gradients) >= 0.98


@pytest.mark.parametrize("biased", ["gate_proj", "up_proj", "v_proj"])
def test_a_bias_of_one_projection_of_a_product(biased: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are one product have biases all or none; otherwise each is called."""
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = build("qwen3", **sizes, head_dim=128, num_hidden_layers=1).bfloat16()
    (layer,) = (m for name, m in model.named_modules() if name.endswith(biased))
    layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, 128).bfloat16())
    ids = tokens(2, 16)
    loss, gradients = loss_and_gradients(model, ids)
    models.patch(model, fp8=True, fused_layers=True)
    fp8_loss, fp8_gradients = loss_and_gradients(model, ids)
    assert fp8_gradients.keys() == gradients.keys()
    assert fp8_loss == pytest.approx(loss, rel=1e-2) and cosine(fp8_gradients, gradients) >= 0.99


def test_a_parametrization_that_comes_after_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model, ids = build("qwen3", num_hidden_layers=1).bfloat16(), tokens(2, 16)
    other = copy.deepcopy(model)
    models.patch(model, fp8=True)
    found = []
    for changed in (model, other):
        layer = changed.model.layers[0]
        for linear in (layer.mlp.down_proj, layer.self_attn.k_proj):
            torch.nn.utils.parametrizations.weight_norm(linear)
        found.append(loss_and_gradients(changed, ids))
    assert found[0][1].keys() == found[1][1].keys()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2) and cosine(found[0][1], found[1][1]) >= 0.99
