"""layer_norm: autograd, errors, torch.compile, arrays, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_bits, poisoned, running_on
from support.layer_norm_cases import EPS, Inputs, check, layer_norm, make
from support.places import at, error_tests, meta_on, order_test
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

from bench.rows import rows_of
from rtkernels.ops.norm import layer_norm as module

# ---- autograd -------------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    x, weight, bias, dy = torch.randn(4, 8), torch.randn(8), torch.randn(8), torch.randn(4, 8)
    tensors = {"x": x, "weight": weight, "bias": bias}
    wide = {name: t.double().requires_grad_() for name, t in tensors.items()}
    F.layer_norm(wide["x"], (8,), wide["weight"], wide["bias"], EPS).backward(dy.double())
    for wanted in ({"x"}, {"weight"}, {"bias"}, {"weight", "bias"}, {"x", "bias"}):
        leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}
        layer_norm(**leaves).backward(dy)
        for name, leaf in leaves.items():
            if name in wanted:
                torch.testing.assert_close(leaf.grad, wide[name].grad.float(), atol=1e-5, rtol=1e-5)
            else:
                assert leaf.grad is None


def test_gradient_through_the_sum_alone() -> None:
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    layer_norm(x, residual=residual)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8)) and torch.equal(residual.grad, torch.ones(4, 8))


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(layer_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: layer_norm(torch.ones(4, 8, dtype=torch.float64)),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (lambda: layer_norm(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "weight shape": (
        lambda: layer_norm(torch.ones(4, 8), torch.ones(4)),
        r"weight has shape \(4,\); expected \(8,\), the last dimension of x",
    ),
    "weight dtype": (
        lambda: layer_norm(torch.ones(4, 8), torch.ones(8).half()),
        "weight has dtype float16; expected one of float32",
    ),
    "weight device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), meta_on(1, torch.ones(8)), None, 1e-5, 0.0),
        "weight has device index 1; expected 0, that of x",
    ),
    "bias shape": (
        lambda: layer_norm(torch.ones(4, 8), None, torch.ones(4, 8)),
        r"bias has shape \(4, 8\); expected \(8,\), the last dimension of x",
    ),
    "bias dtype": (
        lambda: layer_norm(torch.ones(4, 8).half(), torch.ones(8).half(), torch.ones(8)),
        "bias has dtype float32; expected float16, that of weight",
    ),
    "bias device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), None, meta_on(-1, torch.ones(8)), 1e-5, 0.0),
        "bias has device index -1; expected 0, that of x",
    ),
    "residual shape": (
        lambda: layer_norm(torch.ones(4, 8), residual=torch.ones(8)),
        r"residual has shape \(8,\); expected \(4, 8\), that of x",
    ),
    "residual dtype": (
        lambda: layer_norm(torch.ones(4, 8), residual=torch.ones(4, 8).half()),
        "residual has dtype float16; expected float32, that of x",
    ),
    "residual device": (
        lambda: module.ADD_FORWARD.check(
            meta_on(0, torch.ones(4, 8)), meta_on(2, torch.ones(4, 8)), None, None, 1e-5, 0.0
        ),
        "residual has device index 2; expected 0, that of x",
    ),
    "not a tensor": (lambda: layer_norm([1.0, 2.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "dy shape": (
        lambda: module.BACKWARD(torch.ones(4, 4), torch.ones(4, 8), None, None, None, EPS, 0.0, False),
        r"dy has shape \(4, 4\); expected \(4, 8\), that of h",
    ),
    "dsum dtype": (
        lambda: module.BACKWARD(
            torch.ones(4, 8), torch.ones(4, 8), None, None, torch.ones(4, 8).half(), EPS, 0.0, False
        ),
        "dsum has dtype float16; expected float32, that of h",
    ),
    "parameter_grad": (
        lambda: module.BACKWARD(torch.ones(4, 8), torch.ones(4, 8), None, None, None, EPS, 0.0, True),
        "parameter_grad is True but there is neither weight nor bias",
    ),
}

test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, h = layer_norm(x * 2, weight, bias, residual=x)
        return layer_norm(y, weight) + h

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(shape, device=place) for shape in ((rows, 16), (16,), (16,))]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x, weight = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32), np.full(8, 2, "f4")
    y, h = layer_norm(x, weight, residual=x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(h, x + x)
    np.testing.assert_allclose(y, layer_norm(torch.from_numpy(x + x)).numpy() * 2, rtol=1e-5, atol=1e-6)


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    dy, x = torch.randn(2, 4, 32, generator=generator)
    weight, bias = torch.randn(2, 32, generator=generator)
    rows = {row.name: row for row in rows_of(module.OP.name)}
    inputs = {"x": x, "weight": weight, "bias": bias, "eps": EPS}
    forward, backward = rows["layer_norm_fwd"], rows["layer_norm_bwd"]
    torch.testing.assert_close(forward.ours(**inputs), forward.torch(**inputs))
    torch.testing.assert_close(forward.ours(**inputs), forward.fused(**inputs))
    torch.testing.assert_close(backward.ours(dy=dy, **inputs), backward.torch(dy=dy, **inputs))


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("both", "odd", "residual", "hidden_4096", "hidden_20480", "many_short_rows"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device)) for _ in range(2))
    for name in first:
        assert_same_bits(first[name], second[name])


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu")).values(),
    *("odd", "residual", "more_than_the_ring_holds", "residual_many_rows", "many_short_rows", "rows_of_2048"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1024, 1536, 2048, 4096, 5120, 7168, 8192, 12288, 16384, 65536))
def test_bench_shapes(cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, dy, weight, bias = normal(3000, cols), normal(3000, cols), normal(cols), normal(cols)
    with poisoned():
        check(Inputs(x, weight, bias, dy=dy))
        check(Inputs(x, weight.float(), bias.float(), residual=dy, dy=dy, dsum=x))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**31 + 6, 1), (2**28 + 1, 8)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, ...]) -> None:
    if torch.cuda.mem_get_info()[0] < 9 * torch.Size(shape).numel():
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x[-3:].normal_()
    y = layer_norm(x)
    wanted = F.layer_norm(x[-3:].float(), (shape[-1],), eps=EPS)
    torch.testing.assert_close(y[-3:].float(), wanted, atol=2e-2, rtol=1e-2)
    assert (y[:3] == 0).all() and not y.isnan().any()


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x, dy = (torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = torch.rand(2, 1024, device="cuda", dtype=torch.bfloat16).unbind()

    def run() -> tuple[Tensor, ...]:
        y = module.FORWARD(x, weight, bias, EPS, 0.0)
        return y, *module.BACKWARD(dy, x, weight, bias, None, EPS, 0.0, True)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())
