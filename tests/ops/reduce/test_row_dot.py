"""Row dot products: sums at every layout, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, running_on
from support.fp8_cases import same_strides
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce import row_dot as module
from rtkernels.runtime.operator.declared import Meta

row_dot = rtkernels.row_dot
E4M3 = torch.float8_e4m3fn
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "odd": lambda x: x[:, :131],
    "padded rows that fill a block": lambda x: x[:, :512],
    "misaligned": lambda x: x[:, 1:129],
    "three": lambda x: x.view(3, 4, -1),
    "one row": lambda x: x[0],
    "short": lambda x: x[:, :8],
    "one column": lambda x: x[:, :1],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, 4400),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
}


def make(case: str, dtype: torch.dtype, device: str, y_dtype: torch.dtype | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(case))
    whole = torch.randn(2, 12, 4400, generator=generator)
    return [same_strides(CASES[case](v.to(t)), device) for v, t in zip(whole, (dtype, y_dtype or dtype), strict=True)]


def check(x: Tensor, y: Tensor) -> None:
    x, y = (t.detach().requires_grad_(t.is_floating_point() and t.itemsize > 1) for t in (x, y))
    out = row_dot(x, y)
    assert out.dtype == x.dtype and out.is_contiguous()
    products = x.detach().double() * y.detach().double()
    slack = 4 * (x.shape[-1] ** 0.5 + 4) * ROUNDOFF[torch.float32] / ROUNDOFF[x.dtype]
    exact = products.sum(-1)
    assert_close(out.detach(), exact, scale=exact.abs() + slack * products.abs().sum(-1), what="dot", c=1.01)
    g = torch.randn(out.shape, device=out.device).to(out.dtype)
    out.backward(g)
    wanted = g.double()[..., None]
    assert_close(x.grad, wanted * y.detach().double(), what="dx", c=1.01)
    if y.requires_grad:
        assert_close(y.grad, wanted * x.detach().double(), what="dy", c=1.01)


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(*make(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("dense", "odd"):
            check(*make(case, dtype, device))
            check(*make(case, dtype, device, E4M3))


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int) -> None:
    x, y = make("dense", torch.bfloat16, "cpu")
    with rtkernels.emulate("sm_90"):
        want = row_dot(x, y)
    with rtkernels.emulate("sm_90", order=order):
        assert_same_bits(row_dot(x, y), want)


@at("cpu", "sm_90", "cuda")
def test_one_gradient_only(place: str) -> None:
    with running_on(place) as device:
        x, y = torch.randn(2, 3, 16, device=device)
        x.requires_grad_()
        row_dot(x, y).sum().backward()
        assert_same_bits(x.grad, y)


X = torch.ones(4, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: row_dot(X.double(), X.double()),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "y dtype": (lambda: row_dot(X, X.half()), "y has dtype float16; expected one of float32, float8_e4m3fn"),
    "y shape": (lambda: row_dot(X, X[0]), r"y has shape \(8,\); expected \(4, 8\), that of x"),
    "no dimensions": (lambda: row_dot(X[0, 0], X[0, 0]), "x has no dimensions; expected at least one"),
    "not a tensor": (lambda: row_dot([1.0], [1.0]), "expected a torch.Tensor or an array with __dlpack__"),
}


test_errors, test_launchers_raise_the_same_messages = error_tests(BAD)


def test_rows_that_are_too_long() -> None:
    vector = Meta(torch.bfloat16, (2**31,), (1,), -1, 0)
    with pytest.raises(ArgumentError, match=r"x has 1 rows of 2147483648 elements; expected fewer than 2\^31"):
        module._plan_fwd(vector, vector, -1)


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    compiled = torch.compile(lambda x, y: row_dot(x * 2, y), fullgraph=True, backend="aot_eager")
    x, y = torch.randn(2, 4, 8, device=place)
    x.requires_grad_()
    compiled(x, y).sum().backward()
    torch.testing.assert_close(x.grad, 2 * y)


def test_numpy_in_numpy_out() -> None:
    x = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(row_dot(x, x), [4, 4, 4])


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(row_dot(x, X).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_bench_rows_agree_with_torch() -> None:
    rows = {row.name: row for row in rows_of(module.OP.name)}
    x, y = torch.randn(2, 4, 32)
    torch.testing.assert_close(rows["row_dot_fwd"].ours(x=x, y=y), rows["row_dot_fwd"].torch(x=x, y=y))
    inputs = {"dy": x[:, 0], "x": x, "y": y}
    torch.testing.assert_close(rows["row_dot_bwd"].ours(**inputs), rows["row_dot_bwd"].torch(**inputs))


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        check(X, X)


@pytest.mark.gpu
def test_graph_capture() -> None:
    x, y = torch.randn(2, 64, 128, device="cuda")
    replay = captured(lambda: row_dot(x, y))
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), row_dot(x, y))


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    x = torch.ones(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    assert (row_dot(x, x) == 2**15).all()
    assert (module.BACKWARD(x[:, 0], x, x, True, False)[0] == 1).all()
