"""topk: values, indices and gradients at every place it can run, ties, special values, errors, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from rtkernels.ops.router import topk as module

topk = rtkernels.topk


def far_below(x: Tensor) -> Tensor:
    """Return rows with one large number; the others are close to each other, 2 to 2^15 times smaller."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    close = torch.exp2(-(rows % 14) - (x > 0).float()) * (1 + (x.float() * 100).round() * 2.0**-23)
    return torch.where(torch.arange(x.shape[1], device=x.device) == 9, 1.5, close).to(x.dtype)


# name: shape, k, how x is computed from normal numbers
CASES: dict[str, tuple[tuple[int, ...], int, Callable[[Tensor], Tensor]]] = {
    "plain": ((9, 256), 8, lambda x: x),
    "one_row": ((48,), 5, lambda x: x),
    "three_dimensions": ((2, 3, 100), 4, lambda x: x),
    "one_column": ((5, 1), 1, lambda x: x),
    "few_columns": ((11, 8), 2, lambda x: x),
    "all_columns": ((4, 33), 33, lambda x: x),
    "all_64": ((3, 64), 64, lambda x: x),
    "odd": ((3, 131), 9, lambda x: x),
    "many_chosen": ((3, 256), 64, lambda x: x),
    "several_pieces": ((3, 1000), 8, lambda x: x),
    "several_pieces_many": ((2, 1024), 40, lambda x: x),
    "wide": ((2, 500), 10, lambda x: x),
    "wide_many": ((2, 2304), 64, lambda x: x),
    "widest": ((1, 8192), 20, lambda x: x),
    "wide_odd": ((2, 2049), 3, lambda x: x),
    "last_warp_far_below": ((3, 512), 2, lambda x: x - 20 * (torch.arange(512, device=x.device) >= 256)),
    "last_of_three_warps_far_below": ((3, 768), 6, lambda x: x - 20 * (torch.arange(768, device=x.device) >= 512)),
    "no_rows": ((0, 16), 3, lambda x: x),
    "ties": ((6, 256), 8, lambda x: (x * 2).round()),
    "ties_pieces": ((4, 700), 20, lambda x: (x * 2).round()),
    "ties_wide": ((2, 1100), 16, lambda x: x.round()),
    "last_bits_decide_far_below": ((40, 256), 8, lambda x: far_below(x)),
    "half_of_few": ((9, 16), 8, lambda x: x),
    "last_bits_decide": ((6, 256), 8, lambda x: 1 + (x * 40).round() * 2.0**-23),
    "equal": ((3, 256), 16, lambda x: torch.zeros_like(x)),
    "equal_pieces": ((2, 600), 16, lambda x: torch.ones_like(x)),
    "sorted": ((3, 256), 12, lambda x: x.sort(-1).values),
    "sorted_down": ((3, 256), 12, lambda x: x.sort(-1, descending=True).values),
    "zeros_of_both_signs": ((3, 64), 6, lambda x: torch.where(x > 0, 0.0, -0.0)),
    "infinities": ((4, 256), 8, lambda x: torch.where(x.abs() > 1.5, x * torch.inf, x)),
    "nan": ((4, 256), 8, lambda x: torch.where(x > 2, torch.nan, torch.where(x < -2, -torch.nan, x))),
    "minus_infinity": ((2, 40), 7, lambda x: torch.full_like(x, -torch.inf)),
    "strided_rows": ((5, 64), 4, lambda x: torch.cat([x, x], -1)[:, :64]),
    "unaligned": ((5, 256), 4, lambda x: torch.cat([x[:, :1], x], -1)[:, 1:]),
    "transposed": ((40, 6), 3, lambda x: x.t()),
    "expanded": ((1, 64), 3, lambda x: x.expand(4, -1)),
}


def make(case: str, dtype: torch.dtype, device: str) -> tuple[Tensor, int]:
    """Build the input of a case: the same numbers on every device."""
    shape, k, change = CASES[case]
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    return change(torch.randn(shape, generator=generator).to(dtype).to(device)), k


def expected(x: Tensor, k: int) -> Tensor:
    """The columns of the k largest, by a stable sort in fp64."""
    wide = torch.where(x.isnan(), torch.inf, x.double())
    order = torch.sort(wide, dim=-1, descending=True, stable=True).indices
    nan_first = torch.sort(x.isnan().gather(-1, order).int(), dim=-1, descending=True, stable=True).indices
    return order.gather(-1, nan_first)[..., :k]


def check(x: Tensor, k: int, index_dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    """Run forward and backward and compare every bit; return results and gradient."""
    wanted = expected(x, k)
    leaf = x.detach().requires_grad_()
    values, indices = topk(leaf, k, index_dtype=index_dtype)
    assert indices.dtype == index_dtype and values.is_contiguous() and indices.is_contiguous()
    assert torch.equal(indices.long(), wanted)
    chosen = x.gather(-1, wanted)
    assert torch.equal(values.isnan(), chosen.isnan())  # which NaN a conversion gives differs between machines
    assert_same_bits(*(torch.where(t.isnan(), 0, t) for t in (values.detach(), chosen)), "values")
    plain = topk(x.detach(), k, index_dtype=index_dtype)
    assert_same_bits(plain.values, values.detach(), "values without gradients")
    dy = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(x)
    values.backward(dy)
    zeros = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    assert_same_bits(leaf.grad, zeros.scatter(-1, wanted, dy), "dx")
    return values.detach(), indices, leaf.grad


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(*make(case, torch.float32, device))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("plain", "odd", "many_chosen", "several_pieces", "wide_odd", "ties", "nan", "few_columns"):
            check(*make(case, dtype, device), index_dtype=torch.int32)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("plain", "many_chosen", "wide"):
        with running_on("sm_90") as device:
            check(*make(case, torch.float32, device))


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_thread_order_does_not_matter(order: str | int) -> None:
    for case in ("plain", "wide_many", "ties_pieces"):
        with rtkernels.emulate("sm_90", order):
            check(*make(case, torch.float32, "cpu"))


def test_as_torch_without_ties() -> None:
    x = torch.randn(50, 300)
    ours, theirs = topk(x, 17), torch.topk(x, 17)
    assert torch.equal(ours.values, theirs.values) and torch.equal(ours.indices, theirs.indices)


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(topk(x, 2).values.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: topk(torch.ones(4, 8, dtype=torch.float64), 2), "x has dtype float64; expected one of bfloat16"),
    "no dimensions": (lambda: topk(torch.tensor(1.0), 1), "x has no dimensions; expected at least one"),
    "too wide": (lambda: topk(torch.ones(1, 8193), 1), "x has 8193 columns; expected 1 to 8192"),
    "no columns": (lambda: topk(torch.ones(1, 0), 1), "x has 0 columns; expected 1 to 8192"),
    "k zero": (lambda: topk(torch.ones(4, 8), 0), "k is 0; expected 1 to 8 for rows of 8"),
    "k columns": (lambda: topk(torch.ones(4, 8), 9), "k is 9; expected 1 to 8 for rows of 8"),
    "k": (lambda: topk(torch.ones(4, 80), 65), "k is 65; expected 1 to 64 for rows of 80"),
    "index dtype": (lambda: topk(torch.ones(4, 8), 2, index_dtype=torch.int16), "index_dtype is torch.int16; expected"),
    "not a tensor": (lambda: topk([1.0, 2.0], 1), "expected a torch.Tensor or an array with __dlpack__"),
    "gradient shape": (
        lambda: module.BACKWARD(torch.ones(4, 2), torch.zeros(4, 3, dtype=torch.int64), 8),
        r"indices has shape \(4, 3\); expected \(4, 2\), that of g",
    ),
}
test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor) -> Tensor:
        values, indices = topk(x * 2, 3)
        return values * indices

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 4):
        x = torch.randn(rows, 16, device=place)
        grads = []
        for function in (compiled, block):
            leaf = x.clone().requires_grad_()
            function(leaf).square().sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    values, indices = topk(x, 2)
    assert isinstance(values, np.ndarray)
    np.testing.assert_array_equal(values, np.take_along_axis(x, indices, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", ((8192, 256, 8), (8192, 128, 8), (4096, 1024, 64), (1024, 4096, 32), (500, 8192, 64)))
def test_bench_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, cols, k = shape
    check(torch.randn(rows, cols, device="cuda").to(dtype), k)


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    x = torch.zeros(2**23 + 3, 256, device="cuda", dtype=torch.bfloat16)
    x[-1, 7] = 1
    indices = topk(x, 2).indices
    assert indices[-1].tolist() == [7, 0] and (indices[:-1] == torch.tensor([0, 1], device="cuda")).all()


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x = torch.randn(512, 256, device="cuda")
    replay = captured(lambda: topk(x, 8))
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), topk(x, 8))
