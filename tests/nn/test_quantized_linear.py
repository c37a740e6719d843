"""Linear layers with weights of 8 and 4 bits: results, state dicts, compilation, and errors."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from support.cuda_division import CudaDivision
from torch import nn

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.nn import QuantizedLinear

LAYERS = {
    "fp8": {"weights": "fp8"},
    "fp8 groups": {"weights": "fp8", "group": 128},
    "fp8 fp8": {"weights": "fp8", "activations": "fp8"},
    "fp8 fp8 groups": {"weights": "fp8", "group": 128, "activations": "fp8"},
    "int8": {"weights": "int8"},
    "int8 int8": {"weights": "int8", "activations": "int8"},
    "int4": {},
    "int4 32": {"group": 32},
    "int4 row": {"group": 0},
    "int4 int8": {"activations": "int8"},
    "nvfp4": {"weights": "nvfp4"},
}
layers = pytest.mark.parametrize("name", LAYERS)


def _linear(k: int = 256, n: int = 96, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias)


def _wanted(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """Return the product of the dequantised operands, with the input quantised as in the layer."""
    values = x.double()
    if layer.activations is not None:
        largest = 448.0 if layer.activations == "fp8" else 127.0
        blocks = x.float().unflatten(
            -1, (-1, layer.group if layer.activations == "fp8" and layer.group else x.shape[-1])
        )
        scale = blocks.abs().amax(-1, keepdim=True) / largest
        codes = (blocks * (1 / scale)).clamp(-largest, largest) if layer.activations == "fp8" else (blocks / scale)
        codes = codes.to(torch.float8_e4m3fn).float() if layer.activations == "fp8" else codes.round()
        values = (codes * scale).flatten(-2).double()
    y = values @ layer.dequantized().double().T
    return y if layer.bias is None else y + layer.bias.double()


@layers
def test_result(name: str) -> None:
    layer = QuantizedLinear.from_linear(_linear(), **LAYERS[name])
    x = torch.randn(2, 3, 256).to(torch.bfloat16)
    y = layer(x)
    assert y.shape == (2, 3, 96) and y.dtype == x.dtype
    torch.testing.assert_close(y.double(), _wanted(layer, x), rtol=2.0**-7, atol=2e-3)


@pytest.mark.parametrize("name", ("fp8", "int4", "int4 int8", "nvfp4"))
def test_emulated(name: str) -> None:
    """The same through the kernels."""
    layer = QuantizedLinear.from_linear(_linear(128, 40), **LAYERS[name])
    x = torch.randn(3, 128).to(torch.bfloat16)
    with rtkernels.emulate("sm_80"):
        y = layer(x)
    torch.testing.assert_close(y.double(), _wanted(layer, x), rtol=2.0**-7, atol=2e-3)


@layers
def test_weight_is_close(name: str) -> None:
    linear = _linear()
    layer = QuantizedLinear.from_linear(linear, **LAYERS[name])
    error = (layer.dequantized() - linear.weight).norm() / linear.weight.norm()
    assert error < (0.03 if layer.weights in ("fp8", "int8") else 0.2)


@layers
def test_state_dict(name: str) -> None:
    layer = QuantizedLinear.from_linear(_linear(), **LAYERS[name])
    other = QuantizedLinear(256, 96, **LAYERS[name])
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(4, 256).to(torch.bfloat16)
    assert torch.equal(layer(x), other(x))


@layers
def test_compiles(name: str) -> None:
    layer = QuantizedLinear.from_linear(_linear(), **LAYERS[name])
    x = torch.randn(4, 256).to(torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@layers
def test_keeps_codes_and_scales_in_other_dtypes(name: str) -> None:
    layer = QuantizedLinear.from_linear(_linear(bias=False), **LAYERS[name])
    x = torch.randn(4, 256).half()
    before = layer(x)
    layer.half()
    assert layer.weight.dtype in (torch.uint8, torch.int8) and layer.scale.dtype in (torch.float32, torch.uint8)
    assert torch.equal(layer(x), before)


def test_zeros() -> None:
    linear = nn.Linear(128, 16, bias=False)
    nn.init.zeros_(linear.weight)
    for options in LAYERS.values():
        assert not QuantizedLinear.from_linear(linear, **options)(torch.ones(2, 128, dtype=torch.float16)).any()


def test_refuses() -> None:
    for message, options in {
        "weights is 'int3'": {"weights": "int3"},
        "group is 48": {"group": 48},
        "activations is 'fp8'": {"activations": "fp8"},
        "in_features is 200": {"in_features": 200},
        "expected 0 for int8": {"weights": "int8", "group": 128, "activations": "int8"},
    }.items():
        with pytest.raises(ArgumentError, match=message):
            QuantizedLinear(options.pop("in_features", 256), 96, **options)
    layer = QuantizedLinear.from_linear(_linear())
    with pytest.raises(ArgumentError, match="x has dtype float32"):
        layer(torch.randn(3, 256))
    with pytest.raises(ArgumentError, match=r"expected a torch\.nn\.Linear"):
        QuantizedLinear.from_linear(nn.ReLU())
    with pytest.raises(ArgumentError, match="requires grad"):
        layer(torch.randn(3, 256, dtype=torch.float16, requires_grad=True))


def _by_the_rule(weight: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    """Return integer codes by the documented rule: scale = amax / largest, code = round(w / scale)."""
    largest = np.float32(7 if layer.weights == "int4" else 127)
    blocks = weight.detach().float().cpu().numpy().reshape(len(weight), -1, layer.group or weight.shape[1])
    scale = np.abs(blocks).max(-1, keepdims=True) / largest
    return torch.from_numpy((np.rint(blocks / scale) * scale).reshape(weight.shape))


@pytest.mark.parametrize("place", ["cpu", "divides as CUDA", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["int4", "int4 32", "int4 row", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_integer_codes_are_those_of_the_rule_on_every_device(name: str, dtype: torch.dtype, place: str) -> None:
    """Weights of few bits are often half way between two codes, where one ulp of the scale decides."""
    linear = _linear(512, 256).to(dtype)
    with CudaDivision() if place.startswith("divides") else contextlib.nullcontext():
        layer = QuantizedLinear.from_linear(linear.to("cuda" if place == "cuda" else "cpu"), **LAYERS[name])
    assert torch.equal(layer.dequantized().cpu(), _by_the_rule(linear.weight, layer))


@layers
def test_codes_do_not_depend_on_how_a_device_divides(name: str) -> None:
    linear = _linear(512, 256).bfloat16()
    plain = QuantizedLinear.from_linear(linear, **LAYERS[name])
    with CudaDivision():
        other = QuantizedLinear.from_linear(linear, **LAYERS[name])
    for buffer, value in plain.state_dict().items():
        assert torch.equal(value, other.state_dict()[buffer]), buffer
