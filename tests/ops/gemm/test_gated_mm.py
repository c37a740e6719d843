"""``gated_mm``: both halves against fp64, quantised results, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at
from support.product_cases import assert_product, codes, exact, scale, spread
from torch import Tensor

from rtkernels import dequantize_nvfp4, gated_mm, quantize_fp8

ACTS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}


def _run(place: str, *args: Any, **options: Any) -> Any:
    with running_on(place):
        return gated_mm(*args, **options)


def _gated(sums: Tensor, act: str) -> Tensor:
    gate, up = sums.chunk(2, -1)
    return ACTS[act](gate) * up


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("size", [(1, 8, 64), (33, 72, 96), (70, 136, 320)], ids=str)
def test_against_fp64(size: tuple[int, int, int], act: str, place: str) -> None:
    m, n, k = size
    device = "cuda" if place == "cuda" else "cpu"
    a, b = codes("bf16", m, k, device=device), codes("bf16", 2 * n, k, device=device, seed=1)
    bias = torch.randn(2 * n, device=device)
    sums, magnitude = exact(a.values, b.values)
    wanted = _gated(sums + bias.double(), act)
    gate, up = (magnitude + bias.double().abs()).chunk(2, -1)
    for right in (b.codes, b.codes.t()):
        assert_product(_run(place, a.codes, right, bias=bias, act=act), wanted, gate * up)
    sa, sb = scale(m, -(-k // 128), device=device), scale(-(-2 * n // 128), -(-k // 128), device=device)
    a, b = codes("e4m3", m, k, device=device), codes("e4m3", 2 * n, k, device=device, seed=1)
    sums, magnitude = exact(a.values * spread(sa, 1, 128, (m, k)), b.values * spread(sb, 128, 128, (2 * n, k)))
    got = _run(place, a.codes, b.codes, sa, sb, recipe="block_1x128_128x128", act=act)
    assert_product(got, _gated(sums, act), torch.mul(*magnitude.chunk(2, -1)))


@at("cpu", "sm_80", "sm_90", "cuda")
def test_two_global_scales(place: str) -> None:
    device = "cuda" if place == "cuda" else "cpu"
    a, b = codes("e2m1", 9, 64, device=device), codes("e2m1", 32, 64, device=device, seed=1)
    sa, sb = scale(9, 4, kind="ue4m3", device=device), scale(32, 4, kind="ue4m3", device=device)
    factors = torch.tensor([0.01, 0.02], device=device)
    sums, magnitude = exact(a.values * spread(sa, 1, 16, (9, 64)), b.values * spread(sb, 1, 16, (32, 64)))
    each = factors.double().repeat_interleave(16)
    got = _run(place, a.codes, b.codes, sa, sb, recipe="nvfp4", global_scale=factors)
    assert_product(got, _gated(sums * each, "silu"), torch.mul(*(magnitude * each).chunk(2, -1)))


@at("cpu", "sm_80", "sm_90", "cuda")
def test_a_tensor_scale_of_an_nvfp4_result(place: str) -> None:
    """Up divided by the scale, so that codes and block scales are those of the result divided by it."""
    device, tensor_scale = "cuda" if place == "cuda" else "cpu", 0.25
    a, b = codes("e2m1", 9, 64, device=device), codes("e2m1", 96, 64, device=device, seed=1)
    sa, sb = scale(9, 4, kind="ue4m3", device=device), scale(96, 4, kind="ue4m3", device=device)
    sums, _ = exact(a.values * spread(sa, 1, 16, (9, 64)), b.values * spread(sb, 1, 16, (96, 64)))
    factor = 20.0 / float(sums.abs().max())
    wanted = _gated(sums * factor, "silu")
    factors = torch.tensor([factor, factor / tensor_scale], device=device)
    q, s = _run(place, a.codes, b.codes, sa, sb, recipe="nvfp4", global_scale=factors, quant_out="1x16")
    got = dequantize_nvfp4(q, s, torch.tensor(tensor_scale, device=device), dtype=torch.float32).double()
    per = wanted.abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, 1) / 6
    assert q.shape == (9, 24) and s.shape == (9, 3)
    assert float(s.float().max()) < 448  # no block saturates
    assert ((got - wanted).abs() <= per * (1 + 6 / 16) + 6 * tensor_scale * 2.0**-9).all()


@at("cpu", "sm_80", "sm_90", "cuda")
def test_quantised_results(place: str) -> None:
    device = "cuda" if place == "cuda" else "cpu"
    a, b = codes("bf16", 13, 64, device=device), codes("bf16", 512, 64, device=device, seed=1)
    q, s = _run(place, a.codes, b.codes, quant_out="1x128")
    wanted = _gated(exact(a.values, b.values)[0], "silu")
    per = s.double().repeat_interleave(128, 1)
    assert q.shape == (13, 256) and s.shape == (13, 2) and s.stride() == (1, 16)
    assert ((q.double() * per - wanted).abs() <= wanted.abs() * 2**-4 * 1.01 + per * 2**-9).all()
    if place == "cpu":
        same, scales = quantize_fp8(wanted.float(), granularity="group")
        assert (scales - s).abs().max() <= 1e-5 * scales.abs().max()
        assert (same.float() == q.float()).float().mean() > 0.99


def test_gradients() -> None:
    a, b, bias = torch.randn(4, 6, 32).bfloat16(), torch.randn(24, 32).bfloat16(), torch.randn(24)
    given = [t.requires_grad_() for t in (a, b, bias)]
    y = gated_mm(a, b, bias=bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, gated_mm(a.detach(), b.detach(), bias=bias.detach()))
    dout = torch.randn(4, 6, 12)
    y.backward(dout.bfloat16())
    twins = [t.detach().double().requires_grad_() for t in given]
    _gated(twins[0] @ twins[1].t() + twins[2], "silu").backward(dout.double())
    for t, twin in zip(given, twins, strict=True):
        assert (t.grad.double() - twin.grad).norm() <= 1e-2 * twin.grad.norm()
