"""add_residual, add_bias, channel_mul, euler_step, cfg_combine: kernels, values, gradients, memory, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.inference import EVERYWHERE, assert_captures, assert_like_reference, normal_numbers
from support.places import error_tests
from torch import Tensor

import rtkernels
from rtkernels import add_bias, add_residual, cfg_combine, channel_mul, euler_step

normal = normal_numbers(0)


@EVERYWHERE
def test_kernels(where: str) -> None:
    x, r = normal(6, 48), normal(6, 48)
    assert_like_reference(where, add_residual, r, x)
    assert_like_reference(where, add_residual, r, x, gate=normal(6, 144)[:, 96:], bias=torch.ones(48))
    assert_like_reference(where, add_bias, x, normal(48), pos=normal(4, 48))
    assert_like_reference(where, channel_mul, x, torch.linspace(0, 2, 48))
    assert_like_reference(where, euler_step, x.float(), r, torch.tensor(-0.1))
    assert_like_reference(where, cfg_combine, x, r, normal(6, 48), 1.5)


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_kernels_of_other_types_and_shapes(where: str, dtype: torch.dtype) -> None:
    for rows, cols in ((1, 1), (5, 37), (3, 4100)):
        x, r = normal(rows, cols, dtype=dtype), normal(rows, cols, dtype=dtype)
        assert_like_reference(where, add_residual, r, x, gate=normal(cols, dtype=torch.float32))
        assert_like_reference(where, add_bias, x, normal(cols, dtype=dtype), pos=normal(2, cols, dtype=dtype))
        assert_like_reference(where, euler_step, x, r, 0.25)
        assert_like_reference(where, cfg_combine, x, r, x, 1.5)


def compare(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    given = [normal(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
    got, wanted = ours(*given), plain(*given)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    dy = torch.randn(wanted.shape)
    for a, b in zip(*(torch.autograd.grad(t, given, dy) for t in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


FULL, ROW = (2, 3, 16), (16,)


@pytest.mark.parametrize("shape", (ROW, (2, 1, 16), FULL, (3, 16), (1, 3, 16)))
def test_residual_and_its_gradients(shape: tuple[int, ...]) -> None:
    compare(
        lambda r, x, g, b: add_residual(r, x, gate=g, bias=b),
        lambda r, x, g, b: r + g * (x + b),
        FULL,
        FULL,
        shape,
        ROW,
    )


def test_others_and_their_gradients() -> None:
    compare(lambda x, b: add_bias(x, b), lambda x, b: x + b, FULL, ROW)
    compare(lambda x, b, p: add_bias(x, b, pos=p), lambda x, b, p: x + b + p.repeat(2, 1)[:5], (5, 16), ROW, (3, 16))
    compare(
        lambda x, b, p: add_bias(x, b, pos=p, period=2),
        lambda x, b, p: x + b + p[:2].repeat(2, 1),
        (4, 16),
        ROW,
        (3, 16),
    )
    compare(channel_mul, lambda x, s: x * s, FULL, ROW)
    compare(lambda x, v: euler_step(x, v, -0.3), lambda x, v: x - 0.3 * v, FULL, FULL)
    compare(lambda x, v: euler_step(x, v, torch.tensor(2.0)), lambda x, v: x + 2 * v, (), ())
    compare(lambda r, v, u: cfg_combine(r, v, u, 1.5), lambda r, v, u: r + u + 1.5 * (v - u), FULL, FULL, FULL)


def test_one_rounding_and_mixed_types() -> None:
    r, x = torch.full((2, 8), 256.0).bfloat16(), torch.full((2, 8), 0.75).bfloat16()
    assert torch.equal(add_residual(r, x, bias=torch.full((8,), 0.5)), torch.full((2, 8), 257.25).bfloat16())
    actions, velocity = normal(5, 7, dtype=torch.float32), normal(5, 7, dtype=torch.float16)
    wanted = actions - 0.1 * velocity.float()
    torch.testing.assert_close(euler_step(actions, velocity, -0.1), wanted)
    assert euler_step(actions, velocity, -0.1, out=actions) is actions
    torch.testing.assert_close(actions, wanted)
    leaf = velocity.clone().requires_grad_()
    euler_step(actions, leaf, 0.5).sum().backward()
    assert leaf.grad.dtype == torch.float16 and leaf.grad.eq(0.5).all()


def test_in_place_and_empty() -> None:
    r, x = normal(3, 16), normal(3, 16)
    wanted = add_residual(r, x)
    assert add_residual(r, x, out=r) is r and torch.equal(r, wanted)
    assert add_residual(r[:0], x[:0]).shape == (0, 16)
    assert channel_mul(x[:, :0], torch.empty(0).bfloat16()).shape == (3, 0)


@pytest.mark.gpu
def test_a_graph_reads_the_step_from_the_device() -> None:
    x, v, dt = torch.zeros(10, 32, device="cuda"), normal(10, 32).cuda(), torch.full((1,), 0.5, device="cuda")
    out = torch.empty_like(x)
    euler_step(x, v, dt, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        euler_step(x, v, dt, out=out)
    dt.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(out, 2 * v.float())
    r = normal(968, 2048).cuda()
    assert_captures(lambda: add_residual(r, r, gate=r, out=torch.empty_like(r)))


X = torch.ones(2, 8)


def _of(**options: Any) -> Callable[[], Tensor]:
    return lambda: add_residual(X, X, **options)


BAD = {
    "shape": (lambda: add_residual(X, X[:1]), r"x has shape \(1, 8\); expected \(2, 8\), that of residual"),
    "dtype": (lambda: add_residual(X, X.half()), "x has dtype float16; expected float32, that of residual"),
    "gate": (_of(gate=torch.ones(3, 8)), r"gate has shape \(3, 8\); expected one that broadcasts"),
    "bias": (_of(bias=torch.ones(2, 8)), r"bias has shape \(2, 8\); expected \(8,\)"),
    "out": (_of(out=X.half()), "out has dtype float16; expected float32"),
    "pos": (lambda: add_bias(X, X[0], pos=torch.ones(8)), r"pos has shape \(8,\); expected \[positions, 8\]"),
    "period": (lambda: add_bias(X, X[0], pos=X, period=3), "period is 3; expected 1 to 2"),
    "no table": (lambda: add_bias(X, X[0], period=3), "period is given; expected None without pos"),
    "factor": (lambda: channel_mul(X, torch.ones(3)), r"s has shape \(3,\); expected \(8,\)"),
    "dt": (lambda: euler_step(X, X, "0.1"), "dt is '0.1'; expected a number"),
    "dt tensor": (lambda: euler_step(X, X, torch.ones(2)), r"dt is torch.float32 \(2,\); expected a number or one"),
    "velocity": (lambda: euler_step(X.half(), X.bfloat16(), 1.0), "v has dtype torch.bfloat16; expected torch.float16"),
    "r": (lambda: rtkernels.cfg_combine(X, X[:1], X, 1.0), r"v_cond has shape \(1, 8\); expected \(2, 8\)"),
}
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(BAD)
