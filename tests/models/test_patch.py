"""patch(): loss and gradients stay, nothing else changes, and what is left alone is reported."""

from __future__ import annotations

import copy
import io
import pickle
import time

import pytest
import torch
from torch import nn

import rtkernels
from rtkernels import models
from rtkernels.errors import ArgumentError, RtkError

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "glm4", "olmo2", "granite", "cohere2", "smollm3")
MOE = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")


@pytest.mark.parametrize("kind", DENSE + MOE)
def test_loss_and_gradients_stay(kind: str) -> None:
    model = build(kind)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model)
    patched_loss, patched_gradients = loss_and_gradients(model)
    assert abs(patched_loss - loss) <= 1e-5 * loss
    assert largest_error(patched_gradients, gradients) <= 1e-5
    assert report.replaced["norm"] >= 3 and report.replaced["loss"] == 1
    assert report.replaced["rope"] == 2, str(report)
    assert report.replaced["mlp"] + report.replaced["experts"] >= 2, str(report)


def test_unpatch_gives_everything_back() -> None:
    model = build("qwen3")
    classes = [type(m) for m in model.modules()]
    loss, gradients = loss_and_gradients(model)
    models.patch(model)
    assert [type(m) for m in model.modules()] != classes
    assert models.report(model) is not None
    models.unpatch(model)
    assert [type(m) for m in model.modules()] == classes and models.report(model) is None
    again, same = loss_and_gradients(model)
    assert again == loss and largest_error(same, gradients) == 0.0
    assert "_loss_function" not in model.__dict__ and not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_patching_without_gradients_recognizes_as_much(mode) -> None:
    wanted = models.patch(build("qwen3"), fused_layers=True).replaced
    model = build("qwen3")
    with mode():
        assert models.patch(model, fused_layers=True).replaced == wanted


def test_another_model_of_the_process_stays_as_it_was() -> None:
    first, second = build("qwen3"), build("qwen3")
    classes = [type(m) for m in second.modules()]
    function = type(second.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"]
    models.patch(first)
    assert [type(m) for m in second.modules()] == classes
    assert type(second.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"] is function


def test_patching_twice_is_patching_once() -> None:
    model = build("llama")
    report = models.patch(model)
    classes = [type(m) for m in model.modules()]
    assert models.patch(model) is report and [type(m) for m in model.modules()] == classes
    assert models.patched(lambda: build("llama")).model.norm.__class__ is model.model.norm.__class__


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_patched(way: str) -> None:
    model = models.patched(lambda: build("qwen3"), loss=False)
    wanted, gradients = loss_and_gradients(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert type(other.model.norm) is type(model.model.norm)
    loss, same = loss_and_gradients(other)
    assert loss == wanted and largest_error(same, gradients) == 0.0


def test_state_dict_and_checkpoint_stay(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = build("qwen3")
    names = list(model.state_dict())
    models.patch(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    assert loss_and_gradients(loaded)[0] == pytest.approx(loss_and_gradients(model)[0], rel=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_generate_gives_the_same_tokens(kind: str) -> None:
    model = build(kind).eval()
    prompt = tokens(2, 9)
    wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
    static = model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation="static")
    models.patch(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation="static"), static)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = models.patched(lambda: build("qwen3"))
    loss, gradients = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    same_loss, same = loss_and_gradients(model, use_cache=False)
    assert same_loss == loss and largest_error(same, gradients) <= 1e-6


def test_one_graph_under_compile() -> None:
    model = build("qwen3", num_hidden_layers=1)
    models.patch(model)
    loss, gradients = loss_and_gradients(model, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same_loss, same = loss_and_gradients(compiled, use_cache=False)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert largest_error({n.removeprefix("_orig_mod."): g for n, g in same.items()}, gradients) <= 1e-5


def test_autocast() -> None:
    losses = []
    for patched in (False, True):
        model = build("qwen3")
        if patched:
            models.patch(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_and_gradients(model)[0])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


# ---- logits ---------------------------------------------------------------------------------------------------------


def test_logits_can_be_looked_at_after_the_step() -> None:
    model, ids = build("gemma2"), tokens()  # with a soft cap
    wanted = model(input_ids=ids).logits
    models.patch(model)
    out = model(input_ids=ids, labels=ids)
    assert type(out.logits).__name__ == "LazyLogits" and tuple(out.logits.shape) == tuple(wanted.shape)
    assert torch.allclose(out.logits[0, :3], wanted[0, :3], atol=1e-5)
    assert torch.allclose(torch.softmax(out.logits, -1), torch.softmax(wanted, -1), atol=1e-5)
    assert isinstance(model(input_ids=ids).logits, torch.Tensor)
    model.eval()
    assert isinstance(model(input_ids=ids, labels=ids).logits, torch.Tensor)


@pytest.mark.parametrize("items", [None, 11, torch.tensor(11)], ids=["mean", "number", "tensor"])
def test_items_in_batch_and_ignored_labels(items) -> None:
    model, ids = build("qwen3"), tokens()
    labels = ids.clone()
    labels[:, :5] = -100
    kwargs = {} if items is None else {"num_items_in_batch": items}
    wanted = model(input_ids=ids, labels=labels, **kwargs).loss
    models.patch(model)
    assert model(input_ids=ids, labels=labels, **kwargs).loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_loss_that_looks_at_logits_gets_them() -> None:
    model, ids = build("granite"), tokens()  # logits are divided by a number
    models.patch(model)
    out = model(input_ids=ids, labels=ids)
    plain = nn.functional.cross_entropy(out.logits[:, :-1].reshape(-1, 128), ids[:, 1:].reshape(-1))
    assert out.loss.item() == pytest.approx(plain.item(), rel=1e-5)


# ---- negative controls: what the comparison must not accept ----------------------------------------------------------


class _WrongEpsilon(nn.Module):
    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = like.weight, like.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1000 * self.variance_epsilon) * self.weight


class _Detached(_WrongEpsilon):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * rstd.detach() * self.weight


class _ClampedMlp(nn.Module):
    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = like.gate_proj, like.up_proj, like.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)).clamp(max=10) * self.up_proj(x))


@pytest.mark.parametrize("wrong", [_WrongEpsilon, _Detached, _ClampedMlp])
def test_what_only_looks_alike_is_left_alone(wrong: type[nn.Module]) -> None:
    model = build("llama")
    layer = model.model.layers[0]
    if wrong is _ClampedMlp:
        layer.mlp = wrong(layer.mlp)
    else:
        layer.input_layernorm = wrong(layer.input_layernorm)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model)
    (site,) = report.left_alone
    assert site.module == wrong.__name__ and "none of our ops" in site.reason
    assert wrong.__name__ in str(report)
    patched_loss, patched_gradients = loss_and_gradients(model)
    assert patched_loss == pytest.approx(loss, rel=1e-5) and largest_error(patched_gradients, gradients) <= 1e-5
    models.unpatch(model)
    with pytest.raises(RtkError, match=wrong.__name__):
        models.patch(model, strict=True)
    assert models.report(model) is None


# ---- messages -------------------------------------------------------------------------------------------------------


def test_messages() -> None:
    with pytest.raises(ArgumentError, match=r"model is 'llama'; expected a model: .* rtkernels.models.patched"):
        models.patch("llama")
    with pytest.raises(ArgumentError, match=r"model is a dict; expected a torch\.nn\.Module"):
        models.patch({})
    model = build("llama")
    model.model.norm.forward = lambda x: x
    model.model.norm.__dict__["forward"].__module__ = "liger_kernel.transformers"
    with pytest.raises(RtkError, match=r"model\.norm was patched by Liger"):
        models.patch(model)
    with pytest.raises(ArgumentError, match=r"model was compiled by torch\.compile; expected one that was not"):
        compiled = nn.Module()
        compiled._orig_mod = build("llama")
        models.patch(compiled)


def test_a_class_that_others_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    attention = type(model.model.layers[0].self_attn)

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        return q, k

    rotate.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setitem(attention.forward.__globals__, "apply_rotary_pos_emb", rotate)
    with pytest.raises(RtkError, match=r"layers\.0\.self_attn: Liger patched LlamaAttention for all models of this"):
        models.patch(model)


def test_what_was_asked_for_in_vain_is_said() -> None:
    with pytest.warns(UserWarning, match="nothing was replaced in this Linear, which computes as before") as told:
        models.patch(nn.Linear(3, 3))
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="router=, fp8= found nothing to replace in this model"):
        model = models.patched(lambda: build("llama"), fp8=True, router=True)  # too small for fp8
    with pytest.warns(UserWarning, match="patched already: router=, fp8= had other values then; call unpatch"):
        assert models.patch(model) is models.report(model)
    with pytest.raises(RtkError, match="strict=True, and the model is patched already"):
        models.patch(model, strict=True)
    other = build("llama")
    with pytest.raises(RtkError, match="strict=True, and router= found nothing"):
        models.patch(other, router=True, strict=True)
    assert models.report(other) is None


def test_a_model_of_several_processes_is_patched_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = build("llama")
    assert models.patch(wrapped).replaced["loss"] == 1 and models.report(wrapped) is models.report(wrapped.module)


def test_options_leave_kinds_alone() -> None:
    model = build("qwen3")
    report = models.patch(model, norm=False, rope=False, loss=False)
    assert set(report.replaced) == {"mlp"} and "norm" not in str(report)
    assert isinstance(rtkernels.models.report(model), models.PatchReport)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = build("qwen3")
    assert models.patch(model).replaced["norm"] == 9


def test_patching_is_quick() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = AutoConfig.for_model("qwen3", num_hidden_layers=36, head_dim=128, vocab_size=151936, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) > 8e9
    started = time.process_time()  # other processes do not count
    report = models.patch(model, fused_layers=True, attention=True, fp8=True)
    assert time.process_time() - started < 2
    assert report.replaced["fused"] == 3 * 36 and report.replaced["fp8"] == 7 * 36 and not report.left_alone


class _Buffered(nn.Module):
    """A norm with a buffer called weight, which it may use or not."""

    def __init__(self, uses_it: bool) -> None:
        super().__init__()
        self.eps, self.uses_it = 1e-6, uses_it
        self.register_buffer("weight", torch.ones(96))

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return y * self.weight[: x.shape[-1]] if self.uses_it else y


def test_a_buffer_is_no_weight() -> None:
    model = nn.Sequential(_Buffered(False), _Buffered(True))
    x = torch.randn(3, 48)
    wanted = model(x)
    report = models.patch(model, loss=False)
    assert [site.reason for site in report.sites] == [None, "it computes none of our ops"]
    torch.testing.assert_close(model(x), wanted)
