"""What is changed in a patched model counts: hooks, children, attributes, shared memory, and how it is read."""

from __future__ import annotations

import copy

import pytest
import torch
from support.look_alikes import patched
from support.tiny_models import build, largest_error, loss_and_gradients, tokens
from torch import Tensor, nn

from rtkernels import models
from rtkernels.errors import RtkError
from rtkernels.models import merged, replace
from rtkernels.models.generation import supported

pytest.importorskip("transformers", minversion="5.0")

OPTIONS = ({}, {"fused_layers": True})


def _changed(x):
    return x * 1.1 + 0.05 if isinstance(x, Tensor) and x.is_floating_point() else x


def _input(module, args, kwargs):
    return tuple(map(_changed, args)), {n: _changed(x) if n == "hidden_states" else x for n, x in kwargs.items()}


def _output(module, args, output):
    return tuple(map(_changed, output)) if isinstance(output, tuple) else _changed(output)


def _gradient(module, *gradients):
    return tuple(None if g is None else g * 1.1 for g in gradients[0])


HOOKS = {
    "forward": lambda m: m.register_forward_hook(_output),
    "before": lambda m: m.register_forward_pre_hook(_input, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(_gradient),
    "before backward": lambda m: m.register_full_backward_pre_hook(_gradient),
}
HOOKED = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.act_fn", "mlp")


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_fused_layers_see_what_the_modules_are_called_with(kind: str) -> None:
    own = build("qwen3", num_hidden_layers=1)
    ours = copy.deepcopy(own)
    models.patch(ours, fused_layers=True)
    for name in HOOKED:
        handles = [HOOKS[kind](model.get_submodule(f"model.layers.0.{name}")) for model in (own, ours)]
        loss, gradients = loss_and_gradients(own)
        same_loss, same = loss_and_gradients(ours)
        assert same_loss == pytest.approx(loss, rel=1e-5) and largest_error(same, gradients) <= 1e-4, name
        for handle in handles:
            handle.remove()


def _activation(layer: nn.Module) -> None:
    layer.mlp.act_fn = nn.GELU()


def _activation_itself(layer: nn.Module) -> None:
    layer.mlp.act_fn.forward = torch.tanh


def _norm_of_q(layer: nn.Module) -> None:
    layer.self_attn.q_norm = nn.LayerNorm(16, bias=False)


def _epsilon_of_k(layer: nn.Module) -> None:
    layer.self_attn.k_norm.variance_epsilon = 0.5


def _second_norm(layer: nn.Module) -> None:
    layer.post_attention_layernorm = nn.Identity()


def _weight_as_buffer(layer: nn.Module) -> None:
    for module in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.gate_proj):
        weight = module.weight.detach()
        del module.weight
        module.register_buffer("weight", weight)


CHANGES = (_activation, _activation_itself, _norm_of_q, _epsilon_of_k, _second_norm, _weight_as_buffer)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_layer_count(change, options: dict[str, bool]) -> None:
    own = build("qwen3", num_hidden_layers=1)
    ours = copy.deepcopy(own)
    models.patch(ours, **options)
    for model in (own, ours):
        change(model.model.layers[0])
    loss, gradients = loss_and_gradients(own)
    same_loss, same = loss_and_gradients(ours)
    assert same_loss == pytest.approx(loss, rel=1e-5) and largest_error(same, gradients) <= 1e-4
    if change is _activation:
        reasons = {site.name: site.reason for site in models.report(ours).left_alone}
        assert reasons["model.layers.0.mlp"] == "it was changed after patch"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_model_in_float64_computes_as_before(options: dict[str, bool]) -> None:
    own = build("qwen3", num_hidden_layers=1)
    ours = copy.deepcopy(own)
    models.patch(ours, **options)
    loss, gradients = loss_and_gradients(own.double())
    same_loss, same = loss_and_gradients(ours.double())
    assert same_loss == pytest.approx(loss, rel=1e-12) and largest_error(same, gradients) <= 1e-10


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down_proj, self.act_fn, self.dropout = nn.Linear(48, 32, bias=False), nn.SiLU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def test_a_dropout_that_is_switched_on_drops() -> None:
    module, x = _Mlp(), torch.randn(5, 32)
    assert patched(module).replaced["mlp"] == 1
    module.dropout.p = 0.5
    results = []
    for forward in (module, lambda x: _Mlp.forward(module, x)):
        torch.manual_seed(3)
        results.append(forward(x))
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], module.eval()(x))


def test_adapters_and_parametrizations_leave_a_module_replaced() -> None:
    module = _Mlp()
    patched(module)
    kind = type(module)
    module.up_proj = nn.Sequential(module.up_proj, nn.Identity())
    module.new = 3
    module.training = False
    module.train()
    assert type(module) is kind
    module.act_fn = module.act_fn  # the same
    assert type(module) is kind
    module.act_fn = nn.ReLU()
    assert type(module) is _Mlp


def test_a_parametrized_projection_is_computed_once() -> None:
    module, seen = _Mlp(), []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            seen.append(1)
            return weight * 2

    patched(module)
    nn.utils.parametrize.register_parametrization(module.down_proj, "weight", Counted())
    x = torch.randn(3, 32)
    seen.clear()
    y = module(x)
    assert len(seen) == 1
    torch.testing.assert_close(y, _Mlp.forward(module, x))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 1)
        return (x * x).sum()

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


class _NewFunction(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return (x * x).sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


@pytest.mark.parametrize("function", [_Function, _NewFunction])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_function_that_would_lose_the_gradient_of_logits_is_refused(function, read_before: bool) -> None:
    own = build("llama", num_hidden_layers=1)
    ours = copy.deepcopy(own)
    models.patch(ours)
    ids, gradients = tokens(), []
    out = ours(input_ids=ids, labels=ids)
    if read_before:
        out.logits.sum()
    with pytest.raises(RtkError, match=r"Give the Function a tensor: outputs.logits\[:\]"):
        function.apply(out.logits)
    with torch.no_grad():
        assert out.logits.argmax(-1).shape == ids.shape  # a metric
    for model in (own, ours):
        out = model(input_ids=ids, labels=ids)
        (out.loss + function.apply(out.logits[:])).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert largest_error(gradients[1], gradients[0]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_have_the_dtype_of_their_autocast(dtype: torch.dtype) -> None:
    own = build("llama", num_hidden_layers=1)
    ours = copy.deepcopy(own)
    models.patch(ours)
    ids = tokens()
    with torch.autocast("cpu", dtype):
        wanted, read_outside = (model(input_ids=ids, labels=ids).logits for model in (own, ours))
    assert read_outside.dtype == read_outside[:].dtype == wanted.dtype == dtype
    torch.testing.assert_close(read_outside[:], wanted, rtol=2e-2, atol=2e-2)
    outside = ours(input_ids=ids, labels=ids).logits
    with torch.autocast("cpu", dtype):
        assert outside.dtype == outside[:].dtype == torch.float32


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saved_tensors_that_somebody_keeps_stay(options: dict[str, bool]) -> None:
    model, kept = build("llama", num_hidden_layers=1), []
    models.patch(model, **options)

    def pack(t: Tensor) -> int:
        kept.append(t)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    before, sizes = [t.detach().clone() for t in kept], [t.untyped_storage().nbytes() for t in kept]
    loss.backward()
    assert [t.untyped_storage().nbytes() for t in kept] == sizes
    for t, wanted in zip(kept, before, strict=True):
        torch.testing.assert_close(t.detach(), wanted, rtol=0, atol=0, equal_nan=True)


def test_memory_that_another_model_shares_stays_shared() -> None:
    model = build("llama", num_hidden_layers=1)
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.data = p.data
    models.patch(model, fused_layers=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert loss_and_gradients(model)[0] == pytest.approx(loss_and_gradients(other)[0], rel=1e-5)


def test_memory_of_several_processes_stays_shared() -> None:
    model = build("llama", num_hidden_layers=1).share_memory()
    models.patch(model, fused_layers=True)
    assert all(p.is_shared() for p in model.parameters())


def test_weights_are_moved_if_nobody_else_holds_them() -> None:
    model = build("llama", num_hidden_layers=1)
    alias = [p.detach() for p in model.parameters()]
    cycle = [alias]
    cycle.append(cycle)
    del alias, cycle  # freed by the collector
    models.patch(model, fused_layers=True)
    attention = model.model.layers[0].self_attn
    assert merged.adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.act, self.dtype = torch.ones(3), torch.tanh, torch.float32


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "factor", torch.ones(3)),
        lambda m: setattr(m, "act", torch.sigmoid),
        lambda m: setattr(m, "dtype", torch.bfloat16),
    ],
)
def test_graphs_depend_on_attributes_of_modules_of_users(change) -> None:
    module = _Scaled()
    before, factor = supported.stamp(module), module.factor
    assert supported.stamp(module) == before
    change(module)
    assert supported.stamp(module) != before and factor is not None  # whose memory must not be taken again


def test_what_was_not_there_when_a_module_was_replaced_changes_nothing() -> None:
    """Counters and tags of hooks, a forward that a hook assigns and removes again, as accelerate's do."""
    model = build("llama", num_hidden_layers=1)
    models.patch(model)
    before = {name for name, module in model.named_modules() if replace.replaced(module) is not None}
    for module in model.modules():
        module.calls = 0
        module.calls += 1
        module.seen = torch.zeros(1)
        module.seen = torch.ones(1)
        own = module.forward
        module.forward = lambda *args, own=own, **named: own(*args, **named)
        module.forward = own
    assert before and {name for name, module in model.named_modules() if replace.replaced(module) is not None} == before


def test_garbage_is_collected_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, collections = build("llama", num_hidden_layers=3), []
    state = model.state_dict()  # holds all weights
    monkeypatch.setattr(merged.gc, "collect", lambda: collections.append(1) or 0)
    models.patch(model, fused_layers=True)
    assert state and len(collections) == 1
