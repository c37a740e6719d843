"""Calls of torch's functions where kernels have corners: second blocks, last elements, high words, signs and NaN.

Most of these are the cheapest calls that distinguish a kernel from one of its mutants (docs/mutation.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import poisoned
from support.overrides import numbers, taken
from support.places import at
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import rtkernels
from rtkernels.aten import reset, table

INF, NAN = float("inf"), float("nan")
BIG = 1 << 40
FAMILIES = [name for name in table.FAMILIES if name != "rng"]  # inputs are to be torch's
aten = torch.ops.aten


def large(*shape: int) -> torch.Tensor:
    """Return 64-bit integers of both signs with bits in either word."""
    return torch.randint(-BIG, BIG, shape)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return floats as the integers of their bits."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


CALLS: dict[str, Callable[[], Any]] = {
    # pointwise
    "eight inputs side by side": lambda: torch.cat([torch.arange(7 + i) for i in range(8)]),
    "eight long inputs": lambda: torch.cat([torch.full((3, 1200), float(i)) for i in range(8)], 1),
    "rows side by side": lambda: [torch.cat([torch.randn(3, n), torch.randn(3, 12)], 1) for n in (8, 5)],
    "64-bit sums": lambda: large(70) + large(70),
    "floor of negative quotients": lambda: torch.div(torch.arange(-9, 9), torch.tensor(4), rounding_mode="floor"),
    "shifts by the width": lambda: torch.bitwise_left_shift(
        torch.arange(1, 9), torch.tensor([0, 1, 2, 31, 32, 62, 63, 64])),
    "slope of gelu": lambda: aten.gelu_backward(torch.ones(64), torch.linspace(-4, 4, 64), approximate="tanh"),
    "glu of several blocks": lambda: aten.glu_backward(torch.randn(3, 4096), torch.randn(3, 8192), 1),
    "upper triangles": lambda: torch.triu(torch.randn(2, 9, 64), 3),
    "lower triangles": lambda: torch.tril(torch.randn(2, 9, 64), -3),
    "triangles of every second matrix": lambda: torch.tril(torch.randn(3, 4, 9, 8)[:, ::2]),
    # reductions
    "the first of several NaN": lambda: torch.tensor([[1.0, NAN, 2.0, NAN] * 9, [0.0] * 35 + [NAN]]).argmax(1),
    "the first of several NaN in columns": lambda: torch.tensor([1.0, NAN, 2.0, NAN] * 9).view(12, 3).argmax(0),
    "the first of several NaN in many columns": lambda: torch.tensor([[1.0], [NAN], [2.0], [NAN]] * 9).expand(36, 64)
    .contiguous().max(0),
    "variance of one infinity": lambda: torch.tensor([[INF], [1.0], [-INF]]).var(1, correction=0),
    "deviation of an infinity": lambda: torch.tensor([[INF, 1.0], [1.0, 2.0]]).std(0),
    "smallest integers": lambda: torch.tensor([[5, -(2**63), 2**63 - 1, 0] * 9]).amin(1),
    "smallest integers in columns": lambda: (
        torch.tensor([[5], [-(2**63)], [2**63 - 1]]).expand(3, 40).contiguous().amin(0)),
    "index of the smallest integer": lambda: tuple(torch.tensor([[5, -(2**63), 2**63 - 1, 0] * 9]).min(1)),
    "large integers": lambda: (large(6, 70).amax(1), large(6, 70).sum(1), large(70, 6).amax(0)),
    "three dimensions stay": lambda: torch.randn(3, 4, 5, 6, 7).sum((1, 3)),
    "rows of two dimensions": lambda: torch.randn(4, 64, 3, 64).sum((1, 3)),
    "columns of two dimensions": lambda: torch.randn(9, 3, 8, 33).amax((0, 2)),
    "slices of two rows": lambda: torch.randint(0, 9, (2, 70_001)).float().sum(1),
    "lifted columns": lambda: [f(torch.randn(65, 40), 0) for f in (torch.amin, torch.count_nonzero, torch.any)],
    "norms of columns": lambda: torch.linalg.vector_norm(torch.randn(65, 40), 1, 0),
    "the first is the largest": lambda: torch.arange(640, 0, -1).view(10, 64).to(torch.bfloat16).argmax(1),
    "infinitely far": lambda: torch.allclose(torch.tensor([1.0, 2.0]), torch.tensor([1.0, INF])),
    "loss of each": lambda: aten.nll_loss_forward(torch.randn(700, 5), torch.arange(700) % 5, None, 0, -100),
    "gradients of a group norm": lambda: aten.native_group_norm_backward(
        torch.randn(2, 6, 8, 8), torch.randn(2, 6, 8, 8), torch.zeros(2, 3), torch.ones(2, 3), torch.randn(6),
        2, 6, 64, 3, [True, True, True]),
    "groups of channels": lambda: functional.group_norm(torch.randn(2, 6, 8, 8), 3, torch.randn(6), torch.randn(6)),
    # scans
    "repeats": lambda: torch.repeat_interleave(torch.arange(5), torch.tensor([1, 2, 0, 3, 4])),
    "more places than 16 bits": lambda: (torch.ones(70_001).nonzero(), torch.arange(70_001)[torch.arange(70_001) >= 0]),
    "chosen from more places than 16 bits": lambda: (
        torch.masked_select(torch.arange(70_001), torch.arange(70_001) % 3 == 1)),
    "scan of slices": lambda: torch.randint(0, 5, (5003, 3)).float().cumsum(0),
    "scan of large integers": lambda: large(2, 70).cumsum(1),
    # orders
    "sort of large integers": lambda: [tuple(large(n).sort(stable=True)) for n in (40, 300, 5003)],
    "largest of large integers": lambda: large(5003).topk(5),
    "largest of small integers": lambda: (torch.arange(5003) * 7 % 5003).topk(5),
    "largest of negative integers": lambda: (-1 - torch.arange(5003) * 7 % 5003).topk(5),
    "largest of negative numbers": lambda: (-1 - torch.rand(5003)).topk(5),
    "smallest of positive numbers": lambda: (1 + torch.rand(5003)).topk(70, largest=False),
    "among": lambda: torch.isin(torch.arange(300.0), torch.arange(0.0, 290.0, 3.0)),
    "not among large integers": lambda: torch.isin(torch.arange(300) * BIG, torch.arange(70) * 3 * BIG, invert=True),
    "bytes by index": lambda: (
        torch.arange(210, dtype=torch.uint8).view(7, 30).gather(1, torch.arange(112).view(7, 16) % 30)),
    # windows
    "copies with a scale of their own": lambda: aten.upsample_nearest2d(torch.randn(1, 2, 3, 3), [10, 7], 2.0, 2.0),
    "gradients of fewer copies": lambda: (
        aten.upsample_nearest2d_backward(torch.randn(1, 2, 4, 3), [4, 3], [1, 2, 10, 9])),
}  # fmt: skip


@at("sm_90")
@pytest.mark.parametrize("name", CALLS)
def test_as_torch(place: str, name: str) -> None:
    torch.manual_seed(0)
    want = tree_leaves(CALLS[name]())
    torch.manual_seed(0)
    reset()
    with taken(place, FAMILIES):
        got = tree_leaves(CALLS[name]())
    assert sum(row["ours"] for row in rtkernels.report(as_rows=True)), "no call was taken"
    for ours, torchs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, torchs, equal_nan=True)


@at("sm_90")
@pytest.mark.parametrize("shape", [(4, 8), (4, 300), (300, 40)], ids=str)
def test_zeros_of_a_maximum(place: str, shape: tuple[int, int]) -> None:
    """The value of a maximum is the element at its index, including the sign of a zero."""
    torch.manual_seed(0)
    x = torch.where(torch.rand(shape) > 0.5, 0.0, -0.0)
    for dim in (0, 1):
        with taken(place, "red"):
            value, index = x.max(dim)
        assert torch.equal(index, torch.zeros_like(index))
        assert torch.equal(value.signbit(), x.select(dim, 0).signbit())


@at("sm_90")
@pytest.mark.parametrize("n", [40, 300, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_nan_are_sorted_along(place: str, dtype: torch.dtype, n: int) -> None:
    """NaN of either sign is last, in its original order and with all of its bits."""
    torch.manual_seed(0)
    x = numbers(dtype, n)
    places = torch.randperm(n)[:9]
    bits(x)[places] = bits(torch.full((9,), NAN, dtype=dtype)) + torch.arange(9, dtype=bits(x).dtype)
    x[places[::2]] = -x[places[::2]]
    want = torch.sort(x, stable=True)
    with taken(place, "sort"):
        got = torch.sort(x, stable=True)
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(bits(got.values), bits(x[want.indices]))


@at("sm_90")
def test_average_of_copies_is_their_gradient(place: str) -> None:
    """Sizes and scales that do not fit: an element of the result is that of the nearest copy, and no other."""
    x = torch.randn(1, 1, 5, 5, requires_grad=True)
    want = torch.autograd.grad(functional.interpolate(x, size=(3, 2)).sum(), x)
    with taken(place, FAMILIES):
        got = torch.autograd.grad(functional.interpolate(x, size=(3, 2)).sum(), x)
    assert torch.equal(got[0], want[0])


@at("sm_90")
def test_the_weight_of_losses_that_are_not_added(place: str) -> None:
    """The sum is 0, and is written: one block has all of the losses."""
    x, target = torch.randn(7, 5), torch.arange(7) % 5
    with taken(place, FAMILIES), poisoned():
        got = aten.nll_loss_forward(x, target, None, 0, -100)
    assert torch.equal(got[1], torch.tensor(0.0)) and torch.equal(got[0], -x[torch.arange(7), target])
