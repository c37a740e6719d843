"""The codes that fp8 layers cache on their input: inference mode, and inputs that change without a version."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, tokens

from rtkernels.models import fp8 as quantized
from rtkernels.models import fp8_linear
from rtkernels.models.served import serve_linear
from rtkernels.nn import Fp8Linear, fixed_weights

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["serve", "patch"])
def test_inference_mode(how: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under no_grad; more rows than are multiplied without codes."""
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model, ids = build("qwen3", **SIZES).bfloat16().eval(), tokens(2, 20)
    if how == "serve":
        models.serve(model)
    models.patch(model, fused_layers=fused, fp8=how == "patch")
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    with torch.inference_mode(), fixed_weights(model):
        got = model(input_ids=ids).logits
    assert torch.equal(got, wanted)


def test_weights_of_inference_mode() -> None:
    """Weights that were made in inference mode count no versions."""
    with torch.inference_mode():
        layer, x = Fp8Linear(64, 32).bfloat16(), torch.randn(3, 64).bfloat16()
        wanted = layer(x)
        with fixed_weights(layer):
            assert all(torch.equal(layer(x), wanted) for _ in range(2))
            layer.weight.mul_(torch.arange(32)[:, None])
            assert not torch.equal(layer(x), wanted)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("how", ["serve", "patch"])
def test_an_input_that_is_overwritten_without_a_version(how: str, grads: bool) -> None:
    """As the input of a captured graph or of a collective is: each layer reads an object's cached codes once."""
    linears = [nn.Linear(256, 128, bias=False).bfloat16() for _ in range(2)]
    if how == "serve":
        layers = [serve_linear(linear) for linear in linears]
    else:
        layers = [lambda x, m=linear: fp8_linear.linear(m, x, fp8_linear.Recipe()) for linear in linears]
        for linear in linears:
            linear._kept = None
    x, other = (torch.randn(32, 256, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    with torch.set_grad_enabled(grads):
        wanted = [layer(other.clone()) for layer in layers]
        for layer in layers:
            layer(x)
        x.data.copy_(other)
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, wanted, strict=True))


def test_copies_of_an_input_with_codes() -> None:
    """A copy does not use the codes of the original, and a file with such a tensor can be read."""
    layers = [serve_linear(nn.Linear(256, 128, bias=False).bfloat16()) for _ in range(2)]
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        x.mul_(1)
        layers[0](x)
        copied = copy.deepcopy(x)
        while copied._version < x._version:
            copied.mul_(-3)
        assert torch.equal(layers[1](copied), layers[1](copied.clone()))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), x)


@pytest.mark.parametrize("rows", [4, 32])
def test_export_without_dynamo(rows: int) -> None:
    """Tensors without memory, which is_dynamo_compiling says nothing of; read by two layers."""
    layers = nn.Sequential(*(serve_linear(nn.Linear(256, 256, bias=False).bfloat16()) for _ in range(2)))
    layers.forward = lambda x: layers[0](x) + layers[1](x)  # type: ignore[method-assign]
    x = torch.randn(rows, 256).bfloat16()
    with torch.no_grad():
        exported = torch.export.export(layers, (x.clone(),), strict=False)
        assert torch.equal(exported.module()(x.clone()), layers(x))
