"""Strides of results as torch has them: channels last where its strides say so, even if a size of 1 leaves it open."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.overrides import taken
from support.places import emulated

from rtkernels.aten.strides import like_channels_last

SHAPES = [(2, 3, 4, 5), (1, 1, 5, 5), (2, 1, 5, 6), (1, 3, 4, 5), (2, 3, 1, 1), (3, 1, 1, 1), (1, 4, 1, 6)]
LAST = torch.channels_last


def inputs() -> list[torch.Tensor]:
    """Return tensors of both formats, dense and with gaps, and expanded ones."""
    results = []
    for n, c, h, w in SHAPES:
        x, wide = torch.randn(n, c, h, w), torch.randn(n, c, 2 * h, w + 1)
        results += [x, x.to(memory_format=LAST), wide[:, :, ::2, 1:], wide.to(memory_format=LAST)[:, :, ::2, 1:]]
        results += [x[:, :1].expand(n, c, h, w), x.transpose(2, 3)]
    return results


def pooled_grad(x: torch.Tensor) -> torch.Tensor:
    y = torch.arange(float(x[:, :, :1, :1].numel())).view_as(x[:, :, :1, :1])
    size = list(x.shape[2:])
    return torch.ops.aten.avg_pool2d_backward(y, x, size, size, [0, 0], False, True, None)


def max_pooled_grad(x: torch.Tensor) -> torch.Tensor:
    size = list(x.shape[2:])
    y, places = torch.ops.aten.max_pool2d_with_indices(x, size)
    return torch.ops.aten.max_pool2d_with_indices_backward(y, x, size, [], [0, 0], [1, 1], False, places)


FUNCTIONS = {
    "cat": lambda x: torch.cat([x, x.clone()], 1),
    "cat of one": lambda x: torch.cat([x]),
    "cat of mixed": lambda x: torch.cat([x, torch.ones(x.shape)], 2),
    "cat of nine": lambda x: torch.cat([x] * 9, 3),
    "stack": lambda x: torch.stack([x, x], 1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "crop": lambda x: F.pad(x, (0, -(x.shape[3] > 1))),
    "flip": lambda x: x.flip(0, 3),
    "clone": torch.clone,
    "select": lambda x: x[torch.tensor([0, 0, 0])],
    "select second": lambda x: x[:, torch.tensor([0, 0])],
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 0])),
    "index_add": lambda x: x.index_add(0, torch.tensor([0]), torch.ones_like(x[:1])),
    "scatter_add": lambda x: x.scatter_add(0, torch.tensor(0).expand(1, *x.shape[1:]), torch.ones(x.shape)),
    "slice_scatter": lambda x: x.slice_scatter(torch.ones_like(x[:, :1]), 1, 0, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, x.shape[2:]),
    "avg_pool2d_backward": pooled_grad,
    "max_pool2d": lambda x: torch.ops.aten.max_pool2d_with_indices(x, list(x.shape[2:])),
    "max_pool2d_backward": max_pooled_grad,
    "upsample_nearest2d": lambda x: torch.ops.aten.upsample_nearest2d(x, [6, 7]),
    "upsample_nearest2d_backward": lambda x: torch.ops.aten.upsample_nearest2d_backward(
        x, list(x.shape[2:]), [*x.shape[:2], 3, 3]
    ),
    "sort": lambda x: tuple(x.sort(1)),
    "sum": lambda x: x.sum(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "triu": torch.triu,
}  # fmt: skip


@emulated
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_are_torchs(name: str) -> None:
    function, given = FUNCTIONS[name], inputs()
    wanted = [function(x) for x in given]
    with taken("sm_90", ["copy", "idx", "win", "sort", "red", "scan"]):
        found = [function(x) for x in given]
    for x, got, want in zip(given, found, wanted, strict=True):
        for a, b in zip(*(result if isinstance(result, tuple) else (result,) for result in (got, want)), strict=True):
            assert a.stride() == b.stride(), (x.shape, x.stride())
            torch.testing.assert_close(a, b)


_POINTWISE = {
    "one": torch.neg, "two": lambda x: x + x, "three": lambda x: x.addcmul(x, x), "number": lambda x: x * 2.0,
    "clamp": lambda x: x.clamp(0, 1), "bound": lambda x: x.clamp(min=0), "power": lambda x: x.pow(3.5),
    "broadcast": lambda x: x + x[:1], "where": lambda x: torch.where(x > 0, x, x),
    "filled": lambda x: x.masked_fill(x > 0, 1.0), "0-d": lambda x: x + torch.tensor(1.0),
    "two formats": lambda x: x + x.clone(memory_format=torch.contiguous_format),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("name", _POINTWISE)
def test_strides_of_pointwise_results_are_torchs(name: str) -> None:
    """Also of tensors that are dense in two formats, where it matters whether all operands have one shape."""
    given = [torch.randn(shape).to(memory_format=LAST) for shape in (
        (2, 1, 4, 5), (1, 1, 5, 5), (2, 3, 1, 1), (1, 3, 1, 1), (2, 3, 4, 5), (1, 1, 1, 1), (2, 1, 1, 5),
    )]  # fmt: skip
    given += [torch.randn(4, 3, 5).permute(2, 0, 1), torch.randn(4, 3, 5, 2).permute(1, 0, 3, 2)]
    given += [torch.randn(5, 8)[:, ::2], torch.randn(3, 1).expand(3, 4), torch.randn(2, 3, 8, 5)[:, :, ::2]]
    wanted = [_POINTWISE[name](x) for x in given]
    with taken("sm_80", "ew"):
        found = [_POINTWISE[name](x) for x in given]
    for x, got, want in zip(given, found, wanted, strict=True):
        assert got.stride() == want.stride(), (x.shape, x.stride())
        torch.testing.assert_close(got, want, equal_nan=True)


def test_like_channels_last_is_what_torch_suggests() -> None:
    """``cat`` of one tensor gives the suggested format; where both formats coincide, there is nothing to choose."""
    generator = torch.Generator().manual_seed(0)
    told_apart = 0
    for _ in range(400):
        rank = 4 + int(torch.rand((), generator=generator) < 0.2)
        shape = torch.randint(1, 4, (rank,), generator=generator).tolist()
        dense = torch.empty(shape, device="meta").stride()
        last = torch.empty(shape, device="meta", memory_format=LAST if rank == 4 else torch.channels_last_3d).stride()
        if dense == last:
            continue
        steps = list(last if torch.rand((), generator=generator) < 0.5 else dense)
        if torch.rand((), generator=generator) < 0.5:
            steps[int(torch.randint(0, rank, (), generator=generator))] *= 2
        if torch.rand((), generator=generator) < 0.3:
            steps[int(torch.randint(0, rank, (), generator=generator))] = 1
        suggested = torch.cat([torch.empty_strided(shape, steps, device="meta")]).stride() == last
        assert like_channels_last(tuple(shape), tuple(steps)) == suggested, (shape, steps)
        told_apart += suggested
    assert told_apart > 20
