"""Decoding steps with norms and residual sums inside of products: logits, report, what runs as usual."""

from __future__ import annotations

import pytest
import torch

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.generation import model_of, padded, programs
from support.tiny_models import build, tokens

from rtkernels.models import decoding
from rtkernels.models.served import ServedLinear
from rtkernels.ops.gemm import decode_linear, decode_plan, step_experts

pytestmark = pytest.mark.one_in(3)  # whole models: a second each


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "OWN_ROWS", decode_plan.MAX_ROWS)


def _generated(model, batch: int = 3, **options):
    return model.generate(tokens(batch, 9), max_new_tokens=8, do_sample=False, eos_token_id=None, **options)


def _calls(monkeypatch: pytest.MonkeyPatch) -> list:
    calls, own = [], decode_linear.FORWARD.call

    def call(*arguments):
        calls.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(decode_linear.FORWARD, "call", call)
    return calls


def _no_cat(own):
    """Return ``torch.cat`` that refuses vectors: biases are adjacent, so that a step does not copy them."""

    def cat(tensors, *args, **kwargs):
        assert _outside_of_steps() or tensors[0].dim() != 1
        return own(tensors, *args, **kwargs)

    return cat


def _outside_of_steps() -> bool:
    return getattr(decoding._of_thread, "report", None) is None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite"])
def test_layers_of_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products of a layer and the head, with norm, gate and residual; tokens as with the usual modules."""
    model = model_of(kind, torch.bfloat16)
    report = models.patch(model, attention=True, fused_layers=True)
    with monkeypatch.context() as context:
        context.setattr(decoding, "MAX_ROWS", 0)
        wanted = _generated(model, **padded())
    assert not report.in_steps and not report.not_captured
    calls = _calls(monkeypatch)
    models.unpatch(model)
    report = models.patch(model, attention=True, fused_layers=True)
    monkeypatch.setattr(torch, "cat", _no_cat(torch.cat))
    got = _generated(model, **padded())
    layers = model.config.num_hidden_layers
    assert torch.equal(got[:, : 9 + 4], wanted[:, : 9 + 4])  # later tokens may differ after a tie
    assert list(report.in_steps.values()) == [None] * layers and not report.not_captured
    assert f"{layers} x decoder layer with norms and sums inside of products" in str(report)
    assert len(programs(model)[0].tables) == (2 if kind == "gemma3_text" else 1)  # rotary embeddings
    assert len(programs(model)) == 1 and len(calls) == (4 * layers + 1) * (programs(model)[0].count + 1)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "granite", "gpt_oss"])
def test_layers_of_steps_of_many_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are cuBLAS's then, attention is still one launch; tokens as with the usual modules."""
    model = model_of(kind, torch.bfloat16)
    models.patch(model, attention=True, fused_layers=True)
    with monkeypatch.context() as context:
        context.setattr(decoding, "MAX_ROWS", 0)
        wanted = _generated(model, **padded())
    models.unpatch(model)
    monkeypatch.setattr(decoding, "OWN_ROWS", 2)
    report = models.patch(model, attention=True, fused_layers=True)
    calls, products, own = _calls(monkeypatch), [], decoding._by_blas

    def by_blas(*arguments):
        products.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(decoding, "_by_blas", by_blas)
    got = _generated(model, **padded())
    assert torch.equal(got[:, : 9 + 4], wanted[:, : 9 + 4])
    of_layer = 2 if kind == "gpt_oss" else 4
    assert len(products) == of_layer * model.config.num_hidden_layers * (programs(model)[0].count + 1) and not calls
    assert not report.not_captured and len(report.in_steps) == model.config.num_hidden_layers


def test_logits_are_as_close_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of 16-bit logits against fp32 are no larger than those of the usual modules."""
    errors = []
    for most, own in ((0, 0), (16, 16), (16, 0)):
        monkeypatch.setattr(decoding, "MAX_ROWS", most)
        monkeypatch.setattr(decoding, "OWN_ROWS", own)
        total = 0.0
        for seed in range(3):
            torch.manual_seed(seed)
            exact = model_of("qwen3")
            model = model_of("qwen3", torch.bfloat16)
            model.load_state_dict(exact.state_dict())
            exact.load_state_dict(model.state_dict())
            models.patch(model, attention=True, fused_layers=True)
            ids = tokens(2, 9)
            with torch.no_grad():
                model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
                program = programs(model)[0]
                ids = torch.cat([ids, model.generate(ids, max_new_tokens=1, do_sample=False)[:, -1:]], 1)
                program.rows.length.fill_(9)
                program.rows.position.fill_(9)
                program.rows.token.copy_(ids[:, -1:])
                program.prepare()
                got = program.logits(model).float()
                wanted = exact(ids).logits[:, -1]
            total += float((got - wanted).norm() / wanted.norm())
        errors.append(total)
    assert max(errors) <= 1.15 * errors[0]


def _with_experts(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Return a model, its report and the products of its steps, whose tokens were compared with the usual modules'."""
    model = model_of(kind, torch.bfloat16)
    models.patch(model, attention=True, fused_layers=True)
    with monkeypatch.context() as context:
        context.setattr(decoding, "MAX_ROWS", 0)
        wanted = _generated(model, **padded())
    models.unpatch(model)
    report = models.patch(model, attention=True, fused_layers=True)
    calls = _calls(monkeypatch)
    got = _generated(model, **padded())
    assert torch.equal(got[:, : 9 + 4], wanted[:, : 9 + 4])
    return model, report, calls


def test_experts_run_as_usual_behind_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, report, calls = _with_experts("gpt_oss", monkeypatch)
    assert len(calls) == (2 * model.config.num_hidden_layers + 1) * (programs(model)[0].count + 1)
    reason = "its experts have biases or another layout"
    assert set(report.in_steps.values()) == {reason} and f"not fused further: {reason}" in str(report)


def test_experts_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router, selection, and experts with norm and residual: one operator each."""
    found, own = [], step_experts.FORWARD.call

    def call(*arguments):
        found.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(step_experts.FORWARD, "call", call)
    model, report, calls = _with_experts("qwen3_moe", monkeypatch)
    layers, steps = model.config.num_hidden_layers, programs(model)[0].count + 1
    assert len(calls) == (3 * layers + 1) * steps and len(found) == layers * steps
    assert set(report.in_steps.values()) == {None}


def test_layers_with_more_than_experts_run_as_usual() -> None:
    model = model_of("qwen3_moe", torch.bfloat16)
    kind = type(model.model.layers[0].mlp)

    class Doubled(kind):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in model.model.layers:
        layer.mlp.__class__ = Doubled
    report = models.patch(model, attention=True, fused_layers=True)
    _generated(model)
    assert set(report.in_steps.values()) == {"its MLP computes more than its router and its experts"}


def test_hooks_run_as_usual() -> None:
    model = model_of("qwen3", torch.bfloat16)
    report = models.patch(model, attention=True, fused_layers=True)
    module, seen = model.model.layers[0].mlp.down_proj, []

    def hook(*given) -> None:
        seen.append(given)

    hook.__module__ = "rtkernels.tests"  # as one of ours, which do not keep generate() from capturing
    module.register_forward_hook(hook)
    _generated(model)
    assert seen and set(report.in_steps.values()) == {None, "its MLP has hooks"}


def test_float32_and_many_rows_run_as_usual() -> None:
    for model, batch in ((model_of("llama"), 2), (model_of("llama", torch.bfloat16), 65)):
        report = models.patch(model, attention=True, fused_layers=True)
        _generated(model, batch)
        assert not report.in_steps


def test_only_in_steps() -> None:
    model = model_of("llama", torch.bfloat16)
    report = models.patch(model, attention=True, fused_layers=True)
    with torch.no_grad():
        model(tokens(1, 4))
    assert not report.in_steps


@pytest.mark.parametrize("head", [False, True])
def test_served_models(head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3", hidden_size=128, intermediate_size=256, tie_word_embeddings=True).to(torch.bfloat16).eval()
    embedding = model.get_input_embeddings().weight
    models.serve_fp8(model, head=head)
    codes = model.get_output_embeddings().weight
    assert codes.dtype == (torch.float8_e4m3fn if head else torch.bfloat16)
    assert model.get_input_embeddings().weight is embedding and embedding.dtype == torch.bfloat16
    report = models.patch(model, attention=True, fused_layers=True)
    calls = _calls(monkeypatch)
    _generated(model)
    assert set(report.in_steps.values()) == {None} and not report.not_captured
    assert any(call[1].dtype == codes.dtype and call[1].shape == codes.shape for call in calls)
    models.unpatch(model)
    assert type(model.get_output_embeddings()) is (ServedLinear if head else torch.nn.Linear)


def test_rotary_embeddings_read_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same tokens with positions that are not bounded by the number of tokens, and for Gemma 3's two embeddings."""
    for kind, tables in (("llama", 1), ("gemma3_text", 2)):
        model = model_of(kind)
        positions = torch.arange(9).expand(3, 9)
        wanted = [_generated(model), _generated(model, position_ids=positions + 50)]
        models.patch(model, attention=True)
        assert torch.equal(_generated(model), wanted[0]) and len(programs(model)[-1].tables) == tables
        assert torch.equal(_generated(model, position_ids=positions + 50), wanted[1])
        assert programs(model)[-1].tables is None and len(programs(model)) == 2
    rotary = model.model.rotary_emb
    models.unpatch(model)
    assert "_rtkernels_kind" not in dir(type(rotary))
