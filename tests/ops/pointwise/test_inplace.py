"""add_ and scale_: sums in place at every layout and dtype, what they leave alone, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.fp8_cases import same_strides
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.pointwise import inplace as module

add_, scale_ = rtkernels.add_, rtkernels.scale_
G = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "odd": lambda x: x[:, :131],
    "padded rows": lambda x: x[:, :128],
    "misaligned": lambda x: x[:, 1:129],
    "one row": lambda x: x[3],
    "one element": lambda x: x[2, 2],
    "every second": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "three": lambda x: x.view(3, 4, -1)[:, 1:, :64],
    "empty": lambda x: x[:0],
}


def check(view: Callable[[Tensor], Tensor], x_dtype: torch.dtype, y_dtype: torch.dtype, device: str) -> None:
    whole, other = normal(12, 264).to(x_dtype), normal(12, 264).to(y_dtype)
    for alpha, beta in ((1.0, 1.0), (0.7, -1.3), (2.0, 0.0)):
        moved = whole.clone().to(device)
        x, y, old = view(moved), view(other.to(device)), view(whole)
        assert add_(x, y, alpha=alpha, beta=beta) is x
        products = alpha * view(other).double(), beta * old.double()
        slack = 2.0**-22 * sum(p.abs() for p in products) * 2.0 ** {2: 8, 4: 24}[x.itemsize]
        want = sum(products)
        assert_close(x.cpu(), want, scale=want.abs() + slack, what=f"{alpha}, {beta}", c=1.01)
        if (alpha, beta) == (1.0, 1.0):
            assert_same_bits(x.cpu(), (old.float() + view(other).float()).to(x_dtype))
        # Elements outside of the view stay.
        view(moved).copy_(old.to(device))
        assert_same_bits(moved.cpu(), whole, "around")


@pytest.mark.parametrize("name", LAYOUTS)
@at()
def test_add(place: str, name: str) -> None:
    with running_on(place) as device:
        check(LAYOUTS[name], torch.bfloat16, torch.bfloat16, device)
        check(LAYOUTS[name], torch.float32, torch.bfloat16, device)


@pytest.mark.parametrize(
    "pair", [(t, t) for t in DTYPES] + [(torch.float32, torch.float16)], ids=lambda pair: short(pair[1])
)
@at()
def test_dtypes(place: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    with running_on(place) as device:
        check(LAYOUTS["dense"], *pair, device)
        check(LAYOUTS["misaligned"], *pair, device)


@at("cpu", "sm_90", "cuda")
def test_different_layouts(place: str) -> None:
    x, y = normal(16, 24), normal(24, 16).t()
    want = x + y
    with running_on(place) as device:
        assert_same_bits(add_(x.to(device), same_strides(y, device)).cpu(), want)


@at()
def test_arguments_that_share_memory(place: str) -> None:
    with running_on(place) as device:
        for shift in (0, 1, 3):
            a = torch.arange(8000.0, device=device).view(1000, 8)
            wanted = a[shift:] + a[: 1000 - shift]
            assert_same_bits(add_(a[shift:], a[: 1000 - shift]), wanted)


@at()
def test_scale(place: str) -> None:
    with running_on(place) as device:
        for dtype in DTYPES:
            x = normal(5, 40).to(dtype)
            x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
            want = (x.float() * 0.3).to(dtype)
            for factor in (0.3, torch.tensor(0.3, device=device), torch.full((1, 1), 0.3, device=device)):
                got = x.clone().to(device)
                assert scale_(got, factor) is got
                torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
        x = torch.tensor([1.0, torch.inf], device=device)
        assert scale_(x, 0.0).isnan().tolist() == [False, True]


@at("cpu", "sm_90", "cuda")
def test_without_beta_the_old_values_do_not_matter(place: str) -> None:
    with running_on(place) as device:
        x, y = torch.full((3, 16), torch.nan, device=device), torch.full((3, 16), -0.0, device=device)
        assert_same_bits(add_(x, y, beta=0.0).cpu(), y.cpu() * 1.0)


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int) -> None:
    with rtkernels.emulate("sm_90", order=order):
        check(LAYOUTS["dense"], torch.float32, torch.bfloat16, "cpu")


X = torch.ones(3, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: add_(X.double(), X.double()), "x has dtype float64; expected one of bfloat16, float16, float32"),
    "y dtype": (lambda: add_(X.half(), X), "y has dtype float32; expected one of float16"),
    "y shape": (lambda: add_(X, X[0]), r"y has shape \(8,\); expected \(3, 8\), that of x"),
    "y": (lambda: add_(X, None), "y is None; expected a tensor like x"),
    "overlap": (lambda: add_(X[:1].expand(3, 8), X), "expected memory of its own for every element"),
    "factor dtype": (lambda: scale_(X, torch.ones((), dtype=torch.float64)), "factor has dtype float64"),
    "factor shape": (lambda: scale_(X, torch.ones(2)), r"factor has shape \(2,\); expected one element"),
    "not a tensor": (lambda: scale_([1.0], 2.0), "expected a torch.Tensor or an array with __dlpack__"),
}


test_errors, test_launchers_raise_the_same_messages = error_tests(BAD)


@at("cpu", "sm_90", "cuda")
def test_autograd_notices_the_change(place: str) -> None:
    with running_on(place) as device:
        x, weight = torch.randn(4, device=device), torch.randn(4, requires_grad=True, device=device)
        product = (weight * x).sum()
        scale_(x, 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.no_grad():
            assert add_(weight, x) is weight
        with torch.inference_mode():
            scale_(torch.randn(4, device=device), 2.0)


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        add_(z, y)
        return scale_(z, 0.5)

    x, y = torch.randn(2, 3, 8, device=place)
    torch.testing.assert_close(run(x, y), (2 * x + y) / 2)


def test_bench_row() -> None:
    (row,) = rows_of(module.OP.name)
    x, y = torch.randn(2, 4, 16)
    before = x.clone()
    assert_same_bits(row.ours(x=x, y=y.bfloat16()), before)


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        add_(torch.ones(3, 8), X)


@pytest.mark.gpu
def test_graph_capture() -> None:
    x, y, factor = (
        torch.zeros(64, 128, device="cuda"),
        torch.ones(64, 128, device="cuda"),
        torch.ones((), device="cuda"),
    )
    add_(x, y), scale_(x, factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_(x, y), scale_(x, factor)
    x.zero_(), factor.fill_(2.0)
    graph.replay()
    assert (x == 2).all()


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    x, y = (torch.ones(2**31 + 24, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    add_(x, y)
    assert (x == 2).all()
