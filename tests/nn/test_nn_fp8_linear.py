"""The fp8 linear layers as replacements for torch.nn.Linear, under everything that torch does with a layer."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rtkernels.errors import ArgumentError
from rtkernels.nn import Fp8HadamardLinear, Fp8Linear, Fp8SmoothLinear, fixed_weights

LAYERS: dict[str, tuple[type[Fp8Linear], dict[str, Any]]] = {
    "block": (Fp8Linear, {}),
    "row": (Fp8Linear, {"recipe": "row"}),
    "tensor": (Fp8Linear, {"recipe": "tensor"}),
    "hadamard": (Fp8HadamardLinear, {}),
    "smooth": (Fp8SmoothLinear, {}),
    "saved weight": (Fp8Linear, {"save_weight": True}),
    "wgrad in bf16": (Fp8Linear, {"wgrad": "bf16"}),
}
layers = pytest.mark.parametrize("name", LAYERS)


def build_layer(name: str, *sizes: int, **more: Any) -> Fp8Linear:
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    return kind(*(sizes or (128, 64)), **options, **more)


def run(call: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the result and all gradients."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


@layers
def test_parameters_and_state_are_those_of_linear(name: str) -> None:
    layer, linear = build_layer(name, dtype=torch.bfloat16), nn.Linear(128, 64, dtype=torch.bfloat16)
    assert [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    layer.load_state_dict(linear.state_dict())
    linear.load_state_dict(layer.state_dict(), strict=name != "smooth")
    assert_same_bits(layer.weight.detach(), linear.weight.detach())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        x = torch.randn(5, 128).bfloat16()
        same(run(other, other, x), run(layer, layer, x))
    assert LAYERS[name][1].get("recipe", "recipe=") in repr(layer)


@layers
def test_from_linear_shares_parameters(name: str) -> None:
    kind, options = LAYERS[name]
    for bias in (True, False):
        linear = nn.Linear(128, 64, bias=bias, dtype=torch.bfloat16).eval()
        layer = kind.from_linear(linear, **options)
        assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
        x = torch.randn(9, 128).bfloat16()
        assert relative_error(layer(x), linear(x).double()) < (0.08 if name == "tensor" else 0.05)


@layers
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed_layers_have_the_same_bits(name: str, reentrant: bool) -> None:
    layer, x = build_layer(name), torch.randn(3, 7, 128).bfloat16()
    wanted = run(layer, layer, x)
    same(run(lambda t: checkpoint(layer, t, use_reentrant=reentrant), layer, x), wanted)


@layers
@pytest.mark.parametrize("dynamic", (None, True))
def test_compiled_layers_have_the_same_bits(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    layer = build_layer(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (21, 32, 5):
        x = torch.randn(tokens, 128).bfloat16()
        same(run(compiled, layer, x), run(layer, layer, x))


@layers
def test_main_grad_of_the_weight(name: str) -> None:
    layer, x = build_layer(name), torch.randn(21, 128).bfloat16()
    wanted = run(layer, layer, x)
    layer.weight.main_grad = torch.zeros(64, 128)
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch._dynamo.reset()
        layer.zero_grad()
        layer.weight.main_grad.zero_()
        y = call(x.clone().requires_grad_())
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        assert layer.weight.grad is None
        torch.testing.assert_close(layer.weight.main_grad, wanted[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "smooth"])
def test_fixed_weights_are_quantised_one_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build_layer(name), torch.randn(21, 128).bfloat16()
    wanted, quantised = run(layer, layer, x), []
    make = type(layer)._make_codes
    monkeypatch.setattr(type(layer), "_make_codes", lambda *args: quantised.append(args) or make(*args))
    with fixed_weights(nn.Sequential(layer)):
        same(run(layer, layer, x), wanted)
        same(run(layer, layer, x), wanted)
        with torch.no_grad():
            assert_same_bits(layer(x), wanted[0])
            assert len(quantised) == 1
            layer.weight.mul_(2)
            layer.bias.mul_(2)
        torch.testing.assert_close(layer(x), wanted[0] * 2, rtol=2e-2, atol=2e-2)
        assert len(quantised) == 2
    assert layer._kept is None
    layer(x)
    assert len(quantised) == 2


def test_autocast_changes_nothing() -> None:
    layer, x = build_layer("block"), torch.randn(21, 128)
    wanted = run(layer, layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(run(layer, layer, x), wanted)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="recipe is 'mx'; expected one of 'block', 'row', 'tensor', 'hadamard'"):
        Fp8Linear(128, 64, recipe="mx")
    with pytest.raises(
        ArgumentError, match="in_features and out_features are 100 and 64; expected multiples of rotation"
    ):
        Fp8HadamardLinear(100, 64)
    with pytest.raises(ArgumentError, match="alpha is 2; expected 0 to 1"):
        Fp8SmoothLinear(128, 64, alpha=2)
    with pytest.raises(ArgumentError, match=r"linear is a Conv1d; expected a torch\.nn\.Linear"):
        Fp8Linear.from_linear(nn.Conv1d(1, 1, 1))
    with pytest.raises(ArgumentError, match=r"x has shape \(3, 64\); expected \[\.\.\., 128\]"):
        build_layer("block")(torch.randn(3, 64))


# ---- smoothing ------------------------------------------------------------------------------------------------------


def test_factors_move_the_spread_of_channels_into_the_weight() -> None:
    layer = build_layer("smooth")
    x = torch.randn(50, 128) * torch.logspace(-3, 3, 128)
    with torch.no_grad():
        layer.weight.div_(torch.logspace(-3, 3, 128))
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    before = relative_error(layer(x), exact)
    layer.refresh()
    assert relative_error(layer(x), exact) < 0.045 < before
    assert_same_bits(layer.amax, x.abs().amax(0))  # of the call after it
    spread = (x * layer.smooth).abs().amax(0)
    assert spread.max() / spread.min() < 10


def test_maxima_are_kept_in_training_alone() -> None:
    layer, first, second = build_layer("smooth"), torch.randn(5, 128), torch.randn(5, 128)
    layer(first), layer(second)
    assert_same_bits(layer.amax, torch.cat((first, second)).abs().amax(0))
    layer.eval()(torch.full((5, 128), 9.0))
    with torch.no_grad():
        layer.train()(torch.full((5, 128), 9.0))
    assert layer.amax.max() < 9
    smooth = layer.smooth.clone()
    layer.amax.zero_()
    layer.refresh()
    assert_same_bits(layer.smooth, smooth)  # nothing was seen


# ---- training -------------------------------------------------------------------------------------------------------


@functools.cache
def _losses(name: str | None) -> list[float]:
    """Train a model of two layers for 300 steps on labels that a fixed model draws; return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).bfloat16()
    teacher = torch.randn(64, 32) / 4
    if name is not None:
        kind, options = LAYERS[name]
        model[0], model[2] = (kind.from_linear(model[i], **options) for i in (0, 2))
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    found = []
    for _ in range(300):
        x = torch.randn(64, 64)
        labels = torch.multinomial((x @ teacher).softmax(-1), 1)[:, 0]
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), labels)
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        found.append(loss.item())
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ("block", "row"))
def test_training_follows_bf16(name: str) -> None:
    wanted, got = _losses(None), _losses(name)
    first, last = (sum(losses) / 60 for losses in (wanted[:60], wanted[-60:]))
    assert first > 1.2 * last  # something was learned
    for part in (slice(0, 100), slice(100, 200), slice(200, 300)):
        assert abs(sum(got[part]) / sum(wanted[part]) - 1) < 0.01


@layers
def test_optimizers_of_torch(name: str) -> None:
    layer, x = build_layer(name), torch.randn(32, 128)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = layer(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
