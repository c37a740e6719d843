"""act, and glu with its options from layout on: kernels, values, gradients, memory, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.inference import EVERYWHERE, assert_captures, assert_like_reference, normal_numbers, results
from support.places import error_tests
from torch import Tensor

import rtkernels
from rtkernels import Quant, act, glu
from rtkernels.ops.act import combine
from rtkernels.runtime.launch.plans import Plans

normal = normal_numbers(0)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TORCH = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
QUANTS = {
    "static": Quant(E4M3, 0.02),
    "device scale": Quant(E4M3, torch.tensor(0.03)),
    "dynamic": Quant(E4M3),
    "rows": Quant(torch.int8, granularity="row"),
    "blocks": Quant(E5M2, granularity="block128"),
}
FP4 = {"nvfp4": Quant("nvfp4", 1.0), "nvfp4, swizzled": Quant("nvfp4", swizzled=True)}


@EVERYWHERE
def test_kernels(where: str) -> None:
    x = normal(2, 3, 48)
    for kind in TORCH:
        assert_like_reference(where, act, x, kind, add=normal(48))
    assert_like_reference(where, act, x, "silu", add=normal(3, 48, dtype=torch.float32))
    assert_like_reference(where, act, normal(9000), "sigmoid")


@EVERYWHERE
@pytest.mark.parametrize("name", QUANTS)
def test_glu_kernels(where: str, name: str) -> None:
    quant = QUANTS[name]
    assert_like_reference(
        where, glu, normal(5, 320), act="gelu_tanh", quant=quant, keep=True, channel_scale=torch.linspace(0.5, 2, 160)
    )
    assert_like_reference(where, glu, normal(3, 192), layout="interleaved", quant=quant)
    assert_like_reference(where, glu, normal(3, 96), normal(3, 96), act="swiglu_oai", quant=quant)


@EVERYWHERE
def test_threads_that_have_several_vectors(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine, "_WAVE_THREADS", 1e-6)
    Plans.forget_all()
    for cols in (8, 128, 2056):
        x = normal(3, 2 * cols)
        assert_like_reference(where, act, x, "gelu_tanh", add=x)
        for quant in (*QUANTS.values(), FP4["nvfp4"]):
            assert_like_reference(where, glu, x, act="sigmoid", quant=quant)
    Plans.forget_all()


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_kernels_of_other_types_and_shapes(where: str, dtype: torch.dtype) -> None:
    for shape in ((1,), (5, 37), (3, 4098), (1, 2, 3, 8)):
        x, other = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
        assert_like_reference(where, act, x, "gelu_erf", add=other)
        assert_like_reference(where, act, x.t() if x.dim() == 2 else x, "relu")
    for quant in (*QUANTS.values(), *FP4.values()):
        assert_like_reference(where, glu, normal(5, 320, dtype=dtype), quant=quant, keep=True)
        assert_like_reference(where, glu, normal(130, 100, dtype=dtype), layout="interleaved", quant=quant)


@pytest.mark.parametrize("kind", TORCH)
def test_values_and_gradients(kind: str) -> None:
    for shape in ((16,), (2, 1, 16), (2, 3, 16), (3, 16), (1, 3, 16)):
        x, add = (normal(*s, dtype=torch.float32).requires_grad_() for s in ((2, 3, 16), shape))
        y, wanted = act(x, kind, add=add), TORCH[kind](x + add)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
        dy = torch.randn(2, 3, 16)
        for got, exact in zip(*(torch.autograd.grad(t, (x, add), dy) for t in (y, wanted)), strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    x = normal(4, 8)
    assert torch.equal(act(x, kind), TORCH[kind](x.float()).bfloat16()) or kind.startswith("gelu")
    assert act(x, kind, out=x) is x


def test_the_sum_is_not_rounded() -> None:
    x, add = torch.full((1, 8), 256.0).bfloat16(), torch.full((8,), 0.75)
    assert torch.equal(act(x, "relu2", add=add), (256.75**2 * torch.ones(1, 8)).bfloat16())


def test_special_values() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    for kind, function in TORCH.items():
        if not kind.startswith("gelu"):
            torch.testing.assert_close(act(x, kind).nan_to_num(7.0), function(x).nan_to_num(7.0))


def test_glu_layouts_and_codes() -> None:
    x = normal(4, 64, dtype=torch.float32)
    gate, up = x.chunk(2, -1)
    inter = torch.stack((gate, up), -1).flatten(-2)
    wanted = glu(x)
    torch.testing.assert_close(glu(inter, layout="interleaved"), wanted)
    torch.testing.assert_close(glu(gate, up, channel_scale=torch.full((32,), 2.0)), 2 * wanted)
    found = glu(x, quant=E4M3)
    torch.testing.assert_close(found.out.float() * found.scale, wanted, rtol=0.07, atol=1e-2)
    out = torch.empty(4, 32)
    assert glu(x, out=out) is out and torch.equal(out, wanted)
    assert glu(x[:0], quant=E4M3).out.shape == (0, 32)
    leaf = inter.requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(glu(leaf, layout="interleaved", channel_scale=torch.full((32,), 2.0)).sum(), leaf)[0],
        torch.autograd.grad((2 * F.silu(leaf[..., ::2]) * leaf[..., 1::2]).sum(), leaf)[0],
    )


@EVERYWHERE
@pytest.mark.parametrize("name", ("none", "nvfp4", "nvfp4, swizzled", "row"))
def test_glu_of_nvfp4(where: str, name: str) -> None:
    """One launch with the results of dequantisation and glu."""
    quant = {**FP4, "none": None, "row": Quant(torch.int8, granularity="row")}[name]
    gate, up = (rtkernels.quantize_nvfp4(normal(4, 70), swizzled=s) for s in (False, True))
    values = [rtkernels.dequantize_nvfp4(*gate, dtype=torch.float32)]
    values.append(rtkernels.dequantize_nvfp4(*up, swizzled=True, dtype=torch.float32))
    factors = torch.linspace(0.5, 2, 70, dtype=torch.bfloat16 if name == "row" else torch.float32)
    options = {"act": "gelu_tanh", "quant": quant, "channel_scale": factors}
    wanted = results(glu, "cpu", *values, **options)
    for a, b in zip(results(glu, where, gate, up, **options), wanted, strict=True):
        if isinstance(b, Tensor) and b.itemsize == 1:
            assert (a.view(torch.uint8) != b.view(torch.uint8)).sum() <= 0.01 * b.numel()
        elif isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_graphs() -> None:
    x, scale = normal(10, 8192).cuda(), torch.full((1,), 0.02, device="cuda")
    out = torch.empty(10, 4096, dtype=E4M3, device="cuda")
    assert_captures(lambda: glu(x, act="gelu_tanh", quant=Quant(E4M3, scale), out=out))
    assert_captures(lambda: glu(x, quant=E4M3)[:2])
    assert_captures(lambda: act(x, "silu", out=torch.empty_like(x)))


X = torch.ones(2, 8)


def _misfit() -> Tensor:
    return act(X, "relu", add=torch.ones(3))


BAD = {
    "kind": (lambda: act(X, "tanh"), "kind is 'tanh'; expected one of 'gelu_tanh'"),
    "add": (_misfit, r"add has shape \(3,\); expected one that broadcasts to \(2, 8\)"),
    "dtypes": (lambda: act(X.half(), "relu", add=X.bfloat16()), "operands have dtypes torch.bfloat16, torch.float16"),
    "out": (lambda: act(X, "relu", out=torch.ones(8).expand(2, 8)), "out has strides .* memory of its own"),
    "out overlaps": (lambda: act(X[0], "relu", out=X.view(-1)[1:9]), "out shares memory with x; expected its own"),
    "gradient": (lambda: act(X.clone().requires_grad_(), "relu", out=X), "act with out= is not differentiable"),
    "layout": (lambda: glu(X, layout="rows"), "layout is 'rows'; expected one of 'concat'"),
    "up": (lambda: glu(X, X, layout="interleaved"), "up is given; expected None with layout 'interleaved'"),
    "weight": (lambda: glu(X, weight=torch.ones(2), quant=E4M3), "weight and reuse exclude"),
    "channels": (lambda: glu(X, channel_scale=torch.ones(8)), r"channel_scale has shape \(8,\); expected \(4,\)"),
    "codes": (lambda: glu((X,), (X,)), "x is tuple; expected .codes, scales"),
    "keep": (lambda: glu(X, keep=True), "keep is True; expected False without quant"),
}
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(BAD)
