"""``serve``: models with weights of 8 and 4 bits, their decoding steps, the report, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rtkernels
from rtkernels import models
from rtkernels.errors import ArgumentError, RtkError

pytest.importorskip("transformers", minversion="5.0")

from support.generation import programs
from support.tiny_models import build, tokens

from rtkernels.models import decoding
from rtkernels.models.served import ServedExperts, ServedLinear
from rtkernels.nn.quantized_linear import QuantizedLinear
from rtkernels.ops.gemm import decode_linear, swapped_codes_plan

pytestmark = pytest.mark.one_in(3)  # whole models: a second each

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "moe_intermediate_size": 128, "num_experts": 4,
}  # fmt: skip
PACKED = {"int4": "int4", "nvfp4": "e2m1"}


def model_of(kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> nn.Module:
    return build(kind, **{**SIZES, **sizes}).to(dtype).eval()


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.double()


def values_of(module: nn.Module) -> Tensor | None:
    """Return the weight that codes stand for, in float32."""
    if isinstance(module, QuantizedLinear):
        return module.dequantized()
    if isinstance(module, ServedLinear):
        codes, scale = module.weight, module.weight_scale_inv
        return rtkernels.dequantize_fp8(codes, scale, granularity="block", dtype=torch.float32)
    return None


def dequantized(model: nn.Module) -> nn.Module:
    """Return the same model in float32, of plain torch, with the values of its codes."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if (values := values_of(module)) is not None:
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight.data = values
            if module.bias is not None:
                plain.bias.data = module.bias.float()
            path, _, child = name.rpartition(".")
            setattr(model.get_submodule(path), child, plain)
    return model.float()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("weights", ["int4", "nvfp4"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_logits(kind: str, weights: str) -> None:
    """As far from the same weights in float32 as the 16-bit model is from its own; near the 16-bit model."""
    model, ids = model_of(kind), tokens(2, 20)
    plain = logits(model, ids)
    of_16_bits = error(plain, logits(copy.deepcopy(model).float(), ids))
    served = models.serve(model, weights=weights)
    assert served is model and {m.weights for m in model.modules() if isinstance(m, QuantizedLinear)} == {weights}
    exact = logits(dequantized(model), ids)
    assert error(logits(model, ids), exact) <= 1.3 * of_16_bits
    assert float(nn.functional.cosine_similarity(plain.flatten(), exact.flatten(), 0)) > 0.95
    models.patch(model, attention=True, fused_layers=True)
    assert error(logits(model, ids), exact) <= 1.3 * of_16_bits


def _calls(monkeypatch: pytest.MonkeyPatch) -> list:
    calls, own = [], decode_linear.FORWARD.call

    def call(*arguments):
        calls.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(decode_linear.FORWARD, "call", call)
    return calls


def _step(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of a decoding step on the last tokens."""
    model.generate(ids[:, :-1], max_new_tokens=2, do_sample=False, eos_token_id=None)
    (program,) = programs(model)
    program.rows.length.fill_(ids.shape[1] - 1)
    program.rows.position.fill_(ids.shape[1] - 1)
    program.rows.token.copy_(ids[:, -1:])
    program.prepare()
    with torch.no_grad():
        return program.logits(model).double()


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("weights", ["int4", "nvfp4"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "qwen2"])
def test_steps(kind: str, weights: str, head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products of packed codes in a layer and one of the head, with logits as near as a prompt's."""
    model, ids = model_of(kind, tie_word_embeddings=True), tokens(3, 9)
    of_16_bits = error(logits(model, ids), logits(copy.deepcopy(model).float(), ids))
    models.serve(model, weights=weights, head=head)
    exact = logits(dequantized(model), ids)[:, -1]
    report = models.patch(model, attention=True, fused_layers=True)
    calls = _calls(monkeypatch)
    got = _step(model, ids)
    assert error(got, exact) <= 1.5 * of_16_bits
    assert set(report.in_steps.values()) == {None} and not report.not_captured
    layers = model.config.num_hidden_layers
    kinds = [call[7] for call in calls[-4 * layers - 1 :]]
    assert kinds == [PACKED[weights]] * 4 * layers + [None]
    assert calls[-1][1].dtype == (torch.float8_e4m3fn if head else torch.bfloat16)


@pytest.mark.parametrize("weights", ["int4", "nvfp4"])
def test_steps_on_the_emulator(weights: str) -> None:
    """The kernels compute what plain torch does: norm, codes of q, k and v, gate, residual sums."""
    model, ids = model_of("qwen3", num_hidden_layers=1), tokens(2, 5)
    models.serve(model, weights=weights)
    models.patch(model, attention=True, fused_layers=True)
    wanted = _step(model, ids)
    (program,) = programs(model)
    program.prepare()
    with torch.no_grad(), rtkernels.emulate("sm_90"):
        got = program.logits(model).double()
    assert error(got, wanted) < 0.01


@pytest.mark.parametrize(("weights", "group"), [("int8", 0), ("int8", 128), ("fp8", 0), ("int4", 0), ("nvfp4", None)])
def test_steps_of_layers_that_users_quantised(
    weights: str, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any format that `decode_linear` takes, of the head, too."""
    model, ids = model_of("qwen3"), tokens(2, 9)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            path, _, child = name.rpartition(".")
            layer = QuantizedLinear.from_linear(module, weights, group)
            setattr(model.model.get_submodule(path), child, layer)
    model.lm_head = QuantizedLinear.from_linear(model.lm_head, weights, group)
    exact = logits(dequantized(model), ids)[:, -1]
    before = error(logits(model, ids)[:, -1], exact)
    calls = _calls(monkeypatch)
    report = models.patch(model, attention=True, fused_layers=True)
    assert error(_step(model, ids), exact) <= 1.5 * before + 1e-3
    assert calls[-1][1].shape[0] == model.config.vocab_size and calls[-1][1].element_size() == 1
    reasons = {"its projections have different global scales"} if weights == "nvfp4" else {None}
    assert set(report.in_steps.values()) == reasons


def test_layers_that_quantise_activations_run_as_usual() -> None:
    model = model_of("qwen3")
    for layer in model.model.layers:
        layer.mlp.down_proj = QuantizedLinear.from_linear(layer.mlp.down_proj, "int8", activations="int8")
    report = models.patch(model, attention=True, fused_layers=True)
    model.generate(tokens(2, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    (reason,) = set(report.in_steps.values())
    assert reason == "its projections have weights of different formats, or quantise activations"


def test_many_rows_run_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "OWN_ROWS", 2)
    model = models.serve(model_of("qwen3"), weights="int4")
    wanted = model.generate(tokens(3, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    report = models.patch(model, attention=True, fused_layers=True)
    got = model.generate(tokens(3, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(got[:, :6], wanted[:, :6])
    assert set(report.in_steps.values()) == {"more than 2 rows, and weights of codes"}


def test_many_rows_of_fp8_weights_are_products_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers quantise more rows than `AS_IT_IS`, in steps as elsewhere, whatever kernel could take them as they are."""
    monkeypatch.setattr(decoding, "OWN_ROWS", 1)
    monkeypatch.setattr(decoding.served, "AS_IT_IS", 2)
    monkeypatch.setattr(decoding.decode_linear, "serves_many_codes", lambda *given: True)
    model = models.serve(model_of("qwen3"), weights="fp8")
    report = models.patch(model, attention=True, fused_layers=True)
    for rows, wanted in ((2, None), (3, "more than 2 rows: products that quantise them are faster")):
        model.generate(tokens(rows, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert set(report.in_steps.values()) == {wanted}


def test_many_rows_where_a_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked about all weights of a layer before anything is written to the cache."""
    monkeypatch.setattr(decoding, "OWN_ROWS", 2)
    asked: list[tuple] = []
    monkeypatch.setattr(decoding.decode_linear, "serves_many_codes", lambda *given: asked.append(given) or True)
    model = models.serve(model_of("qwen3"), weights="int4")
    wanted = model.generate(tokens(3, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    report = models.patch(model, attention=True, fused_layers=True)
    got = model.generate(tokens(3, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(got[:, :6], wanted[:, :6]) and set(report.in_steps.values()) == {None}
    assert {(rows, packed) for rows, _, _, _, packed, _ in asked} == {(3, "int4")}


def test_many_rows_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows by the kernel of ``swapped_codes_plan``."""
    monkeypatch.setattr(decoding.decode_linear, "serves_many_codes", lambda *given: True)
    model, ids = model_of("qwen3", num_hidden_layers=1), tokens(9, 5)
    models.serve(model, weights="int4")
    models.patch(model, attention=True, fused_layers=True)
    wanted = _step(model, ids)
    (program,) = programs(model)
    program.prepare()
    found, own = [], swapped_codes_plan.launches
    monkeypatch.setattr(swapped_codes_plan, "launches", lambda *p, **options: found.append(p) or own(*p, **options))
    with torch.no_grad(), rtkernels.emulate("sm_90"):
        got = program.logits(model).double()
    assert error(got, wanted) < 0.01 and len(found) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ("int4", "nvfp4", "fp8"))
def test_many_rows_on_a_gpu(weights: str) -> None:
    model, ids = models.serve(model_of("qwen3"), weights=weights).cuda(), tokens(16, 9).cuda()
    exact = logits(dequantized(model), ids)[:, -1]
    before = error(logits(model, ids)[:, -1], exact)
    report = models.patch(model, attention=True, fused_layers=True)
    assert error(_step(model, ids), exact) <= 1.5 * before
    assert set(report.in_steps.values()) == {None}


# ---- the report -----------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = models.serve(model_of("qwen3"), weights="int4")
    report = models.serve_report(model)
    assert report.weights == "int4" and dict(report.coded) == {"int4": 14, "16 bits": 1}
    assert [(site.name, site.reason) for site in report.left_alone] == [("lm_head", "it is the head")]
    assert "int4        14 modules" in str(report) and "16 bits: 1 x Linear: it is the head" in str(report)
    model = models.serve(model_of("qwen3_moe"), weights="nvfp4", head=True)
    report = models.serve_report(model)
    assert dict(report.coded) == {"nvfp4": 8, "fp8": 3}
    assert {site.reason for site in report.left_alone} == {"experts have fp8 weights in every format", "it is the head"}
    assert any(isinstance(module, ServedExperts) for module in model.modules())
    assert models.serve_report(model_of("qwen3")) is None
    report = models.serve_report(models.serve_fp8(model_of("qwen3")))
    assert dict(report.coded) == {"fp8": 14, "16 bits": 1}


def test_layers_of_other_sizes() -> None:
    """Columns that are no multiple of 128: fp8. Few rows or columns: 16 bits."""
    model = models.serve(model_of("qwen3", intermediate_size=208, num_key_value_heads=1), weights="int4")
    found = {site.name.rpartition(".")[2]: (site.kind, site.reason) for site in models.serve_report(model).sites}
    assert found["down_proj"] == ("fp8", "its 208 columns are no multiple of 128, the group of int4")
    assert found["k_proj"] == ("16 bits", "it has fewer than 128 rows or columns")
    assert found["q_proj"] == ("int4", None) and found["gate_proj"] == ("int4", None)
    exact = dequantized(model)
    report = models.patch(model, attention=True, fused_layers=True)
    ids = tokens(2, 9)
    assert error(_step(model, ids), logits(exact, ids)[:, -1]) < 0.03
    (reason,) = set(report.in_steps.values())
    assert reason == "a projection is neither a plain linear layer nor one with weights of codes"


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_errors_change_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="weights is 'int3'; expected one of 'fp8', 'int4', 'nvfp4'"):
        models.serve(model_of(), weights="int3")
    with pytest.raises(ArgumentError, match=r"model_or_path is '.*'; expected a model of transformers"):
        models.serve(tmp_path, weights="int4")
    model = model_of(dtype=torch.float32)
    with pytest.raises(ArgumentError, match="with a weight of float32 on cpu; expected bfloat16 or float16"):
        models.serve(model, weights="int4")
    with pytest.raises(ArgumentError, match="on meta; expected bfloat16 or float16 with memory"):
        models.serve(model_of().to("meta"), weights="nvfp4")
    broken = model_of()
    broken.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.inf
    with pytest.raises(RtkError, match=r"model.layers.1.mlp.down_proj has weights that are not finite"):
        models.serve(broken, weights="nvfp4")
    for untouched in (model, broken):
        assert not any(isinstance(m, QuantizedLinear) for m in untouched.modules())
        assert models.serve_report(untouched) is None


def test_export_refuses_packed_weights(tmp_path: Path) -> None:
    model = models.serve(model_of(), weights="int4")
    with pytest.raises(RtkError, match="has int4 weights, which fp8 files cannot hold"):
        models.export_fp8(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- weights --------------------------------------------------------------------------------------------------------


def test_projections_that_are_one_matrix_share_a_global_scale() -> None:
    model = model_of("qwen3")
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight.data *= 100
    layer.v_proj.weight.data.zero_()
    largest = layer.k_proj.weight.abs().max().float()
    models.serve(model, weights="nvfp4")
    linears = [layer.q_proj, layer.k_proj, layer.v_proj]
    for linear in linears:
        torch.testing.assert_close(linear.global_scale, largest / 2688)
    assert not layer.v_proj.dequantized().any() and layer.q_proj.dequantized().any()
    models.patch(model, fused_layers=True)
    assert len({linear.global_scale.data_ptr() for linear in linears}) == 1
    model.half()
    assert layer.q_proj.global_scale.dtype == torch.float32 and layer.q_proj.weight.dtype == torch.uint8
    copied = copy.deepcopy(model)
    assert torch.equal(copied.model.layers[0].self_attn.q_proj.dequantized(), layer.q_proj.dequantized())


def test_served_models_keep_their_state() -> None:
    ids = tokens(1, 5)
    model = models.serve(model_of(), weights="int4")
    other = models.serve(model_of(), weights="int4")
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))
    assert models.serve(model, weights="int4") is model  # again changes nothing
    assert torch.equal(logits(other, ids), logits(model, ids))
    report = models.serve_report(models.serve(model, weights="nvfp4"))
    assert {site.reason for site in report.left_alone} == {"it had int4 weights before", "it is the head"}
