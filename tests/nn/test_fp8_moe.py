"""Fp8MoE and Fp8GroupedLinear against fp64 (noise of fp8), and against their steps one by one (the same bits)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_bits, poisoned, relative_error, running_on
from support.places import at
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.nn import Fp8GroupedLinear, Fp8MoE, fixed_weights

# Tokens, hidden, ffn, experts, top_k.
SHAPES = {
    "one token": (1, 128, 128, 4, 2),
    "77 tokens": (77, 144, 96, 5, 2),
    "whole blocks": (160, 256, 128, 4, 3),
    "sizes of models": (40, 2880, 1152, 2, 1),
}
# There are two products of quantised operands between x and the result, and three between dy and the weights.
LIMIT = {"y": 0.08, "x": 0.08, "router_weight": 0.13, "gate_up_weight": 0.08, "down_weight": 0.08}


def run(call: Any, module: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the result and all gradients."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = call(x)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        assert_same_bits(got[name], value, name)


def exact(layer: Fp8MoE, x: Tensor) -> dict[str, Tensor]:
    """Return the same in fp64, with the experts that the layer chooses."""
    chosen = layer.route(x.detach()).indices.long()
    leaves = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    wide = x.detach().double().requires_grad_()
    probs = (wide @ leaves["router_weight"].t()).softmax(-1).gather(1, chosen)
    probs = probs / probs.sum(-1, keepdim=True)
    y = torch.zeros_like(wide)
    for e in range(layer.experts):
        tokens, choice = (chosen == e).nonzero(as_tuple=True)
        gate, up = (wide[tokens] @ leaves["gate_up_weight"][e].t()).chunk(2, -1)
        part = (F.silu(gate) * up) @ leaves["down_weight"][e].t()
        y = y.index_add(0, tokens, part * probs[tokens, choice, None])
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).to(x.dtype).to(y))
    return {"y": y.detach(), "x": wide.grad, **{name: leaf.grad for name, leaf in leaves.items()}}


def build_layer(shape: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Fp8MoE, Tensor]:
    tokens, *sizes = SHAPES[shape]
    torch.manual_seed(0)
    return Fp8MoE(*sizes, dtype=torch.float32, **options), torch.randn(tokens, sizes[0]).to(dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("shape", SHAPES)
@at("cpu", "cuda")
def test_noise_against_exact_arithmetic(place: str, shape: str, dtype: torch.dtype) -> None:
    if shape == "sizes of models" and dtype != torch.bfloat16:
        pytest.skip("one dtype is enough")
    with running_on(place) as device:
        layer, x = build_layer(shape, dtype)
        layer, x = layer.to(device), x.to(device)
        with poisoned():
            got = run(layer, layer, x)
        assert got["y"].dtype == got["x"].dtype == dtype
        for name, value in exact(layer, x).items():
            limit = LIMIT[name] * (1.6 if shape == "one token" else 1)
            if name == "router_weight" and shape == "sizes of models":
                continue  # one expert, renormalised: its probability is 1 and its gradient 0
            assert relative_error(got[name], value) < limit, name


@at("sm_90")
def test_kernels_agree_with_plain_torch(place: str) -> None:
    torch.manual_seed(0)
    layer, x = Fp8MoE(80, 48, 3, 2), torch.randn(20, 80).bfloat16()
    wanted = run(layer, layer, x)
    with running_on(place), poisoned():
        got = run(layer, layer, x)
    for name, value in wanted.items():  # a code may be the next one where a value was rounded the other way
        assert relative_error(got[name], value) < 1e-2, name


def test_no_tokens() -> None:
    layer = Fp8MoE(64, 64, 4, 2)
    got = run(layer, layer, torch.randn(0, 64).bfloat16())
    assert got["y"].shape == (0, 64) and got["x"].shape == (0, 64)
    assert not any(got[name].any() for name in ("gate_up_weight", "down_weight"))


def test_steps_one_by_one() -> None:
    """The forward pass equals the public functions in sequence, bit for bit."""
    layer, x = build_layer("77 tokens")
    routing = layer.route(x)
    index = rtkernels.moe_index(routing.indices, layer.experts, multiple_of=128)
    rows = rtkernels.moe_permute(x, index, probs=routing.probs)
    y = torch.zeros(len(index.slots), layer.hidden, dtype=x.dtype)
    offsets = index.offsets.tolist()
    for e, (first, end) in enumerate(itertools.pairwise(offsets)):
        if first == end:
            continue
        hidden = rtkernels.fp8_linear(rows.y[first:end], layer.gate_up_weight[e].detach())
        codes = rtkernels.glu_fp8(hidden, weight=rows.probs[first:end].detach())
        y[first:end] = rtkernels.fp8_linear(codes, layer.down_weight[e].detach())
    with torch.no_grad():
        assert_same_bits(layer(x), rtkernels.moe_unpermute(y, index))


def test_one_expert_is_an_mlp() -> None:
    torch.manual_seed(0)
    layer, x = Fp8MoE(80, 48, 1, 1), torch.randn(20, 80).bfloat16()
    hidden = rtkernels.fp8_linear(x, layer.gate_up_weight[0].detach())
    wanted = rtkernels.fp8_linear(rtkernels.glu_fp8(hidden), layer.down_weight[0].detach())
    assert_same_bits(run(layer, layer, x)["y"], wanted)


def test_leading_dimensions_and_routing() -> None:
    layer, x = build_layer("77 tokens")
    y, routing = layer(x.view(7, 11, -1), return_routing=True)
    assert_same_bits(y.detach().flatten(0, 1), layer(x).detach())
    assert routing.indices.shape == (77, 2) and int(routing.counts.sum()) == 77 * 2


def test_selection_bias_chooses_and_nothing_else() -> None:
    layer, x = build_layer("77 tokens", score="sigmoid", selection_bias=True)
    layer.selection_bias[3] = 10.0
    _, routing = layer(x, return_routing=True)
    assert int(routing.counts[3]) == 77 and routing.probs.max() <= 1
    assert "selection_bias" in layer.state_dict()


def test_choices_without_room_are_dropped() -> None:
    layer, x = build_layer("77 tokens", rows=256)  # two experts' worth of rows for five
    y = layer(x)
    kept = rtkernels.moe_index(layer.route(x).indices, 5, multiple_of=128, rows=256)
    assert int(kept.dropped) > 0
    gone = (kept.rows < 0).all(1)
    assert gone.any() and not y[gone].any() and y[~gone].abs().amax(1).min() > 0


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing_changes_no_bits(reentrant: bool) -> None:
    layer, x = build_layer("77 tokens")
    same(run(lambda t: checkpoint(layer, t, use_reentrant=reentrant), layer, x), run(layer, layer, x))


def test_compiled_without_a_break() -> None:
    """No step reads a value on the host, so there is a single graph for any routing."""
    torch._dynamo.reset()
    layer, x = build_layer("77 tokens")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (77, 40):
        same(run(compiled, layer, x[:tokens]), run(layer, layer, x[:tokens]))


def test_fixed_weights() -> None:
    layer, x = build_layer("77 tokens")
    wanted = run(layer, layer, x)
    with fixed_weights(layer):
        same(run(layer, layer, x), wanted)
        same(run(layer, layer, x), wanted)
        assert set(layer._kept) == {"gate_up", "down"}


def test_main_grads_are_added_to() -> None:
    layer, x = build_layer("77 tokens")
    wanted = run(layer, layer, x)
    layer.zero_grad()
    for p in layer.parameters():
        p.main_grad = torch.ones_like(p)
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    for name, p in layer.named_parameters():
        assert p.grad is None, name
        torch.testing.assert_close(p.main_grad - 1, wanted[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("trained", ("router_weight", "gate_up_weight", "down_weight", "x"))
def test_one_gradient_alone(trained: str) -> None:
    layer, x = build_layer("77 tokens")
    wanted = run(layer, layer, x)[trained]
    layer.zero_grad()
    layer.requires_grad_(False)
    leaf = x.detach().clone()
    (leaf if trained == "x" else getattr(layer, trained)).requires_grad_()
    y = layer(leaf)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    assert_same_bits((leaf if trained == "x" else getattr(layer, trained)).grad, wanted)


def test_what_is_saved() -> None:
    """It saves codes of tokens, gated values and weights, and gate and up; nothing else that large."""
    layer, x = build_layer("whole blocks")
    layer, saved = layer.bfloat16(), []
    routing = layer.route(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x.requires_grad_())
    rows = rtkernels.moe_rows(160 * 3, 1, 4, 128)
    large = sorted(t.nbytes for t in saved if t.nbytes > routing.probs.nbytes * 40)
    weights = [layer.gate_up_weight.numel(), layer.down_weight.numel()]
    tokens, gated, hidden = rows * 256, rows * 128, rows * 256 * 2
    router_input = x.nbytes
    assert large == sorted([*weights, tokens, gated, hidden, router_input])


# ---- one product ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ((128, 64), (144, 80), (100, 50)))
def test_grouped_linear_is_a_linear_for_each_group(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = Fp8GroupedLinear(4, *sizes)
    x = torch.randn(650, sizes[0]).bfloat16()
    ends = torch.tensor([128, 128, 512, 640], dtype=torch.int32)
    got = run(lambda t: layer(t, ends), layer, x)
    dy = torch.randn(650, sizes[1], generator=torch.Generator().manual_seed(1)).to(x)
    first = 0
    for g, end in enumerate(ends.tolist()):
        part, weight = x[first:end].clone().requires_grad_(), layer.weight[g].detach().clone().requires_grad_()
        if first == end:
            assert not got["weight"][g].any()
            continue
        y = rtkernels.fp8_linear(part, weight)
        y.backward(dy[first:end])
        torch.testing.assert_close(got["y"][first:end], y.detach(), rtol=8e-3, atol=1e-5)
        torch.testing.assert_close(got["x"][first:end], part.grad, rtol=8e-3, atol=1e-4)
        torch.testing.assert_close(got["weight"][g], weight.grad, rtol=1e-5, atol=1e-4)
        first = end
    assert not got["y"][640:].any() and not got["x"][640:].any()


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="hidden is 100; expected a multiple of 16"):
        Fp8MoE(100, 64, 4, 2)
    with pytest.raises(ArgumentError, match="top_k is 5 and experts 4; expected 1 <= top_k <= experts <= 512"):
        Fp8MoE(64, 64, 4, 5)
    with pytest.raises(ArgumentError, match="rows is 100; expected a multiple of 128"):
        Fp8MoE(64, 64, 4, 2, rows=100)
    with pytest.raises(ArgumentError, match=r"x has shape \(3, 32\); expected \[\.\.\., 64\]"):
        Fp8MoE(64, 64, 4, 2)(torch.randn(3, 32))
    with pytest.raises(ArgumentError, match="x has dtype float64"):
        Fp8MoE(64, 64, 4, 2)(torch.randn(3, 64).double())
    layer = Fp8GroupedLinear(2, 64, 32)
    with pytest.raises(ArgumentError, match=r"ends is int64 \(2,\); expected int32 \(2,\)"):
        layer(torch.randn(128, 64), torch.tensor([0, 128]))
    with pytest.raises(ArgumentError, match=r"x has shape \(128, 32\); expected \[rows, 64\]"):
        layer(torch.randn(128, 32), torch.tensor([0, 128], dtype=torch.int32))
    layer.weight.main_grad = torch.zeros(2, 32, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"weight\.main_grad has dtype bfloat16"):
        layer(torch.randn(128, 64), torch.tensor([0, 128], dtype=torch.int32))
