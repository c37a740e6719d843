"""``patch`` of group norms."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rtkernels.models import patch, unpatch
from rtkernels.models.replace import replaced


class Block(nn.Module):
    """A residual block as diffusers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 16), nn.GroupNorm(2, 16, eps=1e-6, affine=False)
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.nonlinearity = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        return x + self.conv2(self.nonlinearity(self.norm2(h)))


class Own(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input * 2, self.num_groups, self.weight, self.bias, self.eps)


def names(model: nn.Module) -> set[str]:
    """Return the names of replaced group norms."""
    found = ((name, replaced(m)) for name, m in model.named_modules())
    return {name for name, kind in found if kind is not None and kind.kind == "group_norm"}


def compare(model: nn.Module, *inputs: Tensor) -> None:
    original = copy.deepcopy(model)
    patch(model)
    results = []
    for one in (model, original):
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = one(*leaves)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(t.grad for t in leaves), *(p.grad for p in one.parameters())])
    for got, want in zip(*results, strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@at("cpu", "sm_90", "cuda")
def test_a_residual_block(place: str) -> None:
    with running_on(place) as device:
        block = Block().to(device)
        compare(block, torch.randn(2, 16, 3, 5, device=device))
        assert names(block) == {"norm1", "norm2"} and isinstance(block.norm1, nn.GroupNorm)
        x = torch.randn(2, 16, 3, 5, device=device)  # a silu behind the norm is not part of it
        want = F.group_norm(x, 4, block.norm1.weight, block.norm1.bias)
        torch.testing.assert_close(copy.deepcopy(block.norm1)(x), want)
        unpatch(block)
        assert type(block.norm1) is nn.GroupNorm


def test_a_norm_alone_is_replaced() -> None:
    norm = nn.GroupNorm(4, 16)
    compare(norm, torch.randn(2, 16, 7))
    assert names(norm) == {""}


def test_what_computes_something_else_is_left_alone() -> None:
    model = nn.Sequential(Own(2, 8), nn.GroupNorm(2, 8), nn.SiLU())
    report = patch(model)
    assert names(model) == {"1"} and "none of our ops" in str(report)


def test_a_block_that_is_computed_again_in_backward() -> None:
    block = Block()
    compare(nn.Sequential(block), torch.randn(2, 16, 3, 5))
    x = torch.randn(2, 16, 3, 5, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    block(x).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_other_dtypes_and_autocast_run_the_original() -> None:
    block = Block()
    patch(block)
    x = torch.randn(2, 16, 3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block.norm1(x.bfloat16()).dtype == F.group_norm(x.bfloat16(), 4).dtype
    y = block.double()(x.double())
    unpatch(block)
    torch.testing.assert_close(block(x.double()), y)


def test_diffusers_blocks() -> None:
    resnet = pytest.importorskip("diffusers.models.resnet")
    block = resnet.ResnetBlock2D(in_channels=16, out_channels=16, temb_channels=8, groups=4)
    compare(block, torch.randn(2, 16, 4, 4), torch.randn(2, 8))
    assert names(block) == {"norm1", "norm2"}
