"""``patch`` of group norms, alone and with the silu behind them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at
from torch import Tensor, nn

from rtkernels.models import patch, unpatch
from rtkernels.models.group_norms import _behind
from rtkernels.models.replace import replaced


class Block(nn.Module):
    """A residual block as diffusers writes it."""

    def __init__(self, time: str = "default") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 16), nn.GroupNorm(2, 16, eps=1e-6)
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.nonlinearity = nn.SiLU()
        self.time = time

    def forward(self, x: Tensor, temb: Tensor | None = None) -> Tensor:
        h = x
        h = self.norm1(h)
        h = self.nonlinearity(h)
        h = self.conv1(h)
        if temb is not None:
            temb = self.nonlinearity(temb)
        if self.time == "default":
            if temb is not None:
                h = h + temb
            h = self.norm2(h)
        else:
            h = self.norm2(h)
            h = h * 2
        h = self.nonlinearity(h)
        return x + self.conv2(h)


class Reads(Block):
    """The result of a norm has another reader."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        y = self.nonlinearity(h)
        return self.conv1(y) + h


class Twice(Block):
    """A norm without silu at one of two places."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        x = self.nonlinearity(x)
        return self.norm1(x)


class Own(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input * 2, self.num_groups, self.weight, self.bias, self.eps)


def kinds(model: nn.Module) -> dict[str, bool]:
    """Return the replaced group norms by name, and whether they compute silu."""
    found = ((name, replaced(m)) for name, m in model.named_modules())
    return {name: dict(kind.options)["silu"] for name, kind in found if kind is not None and kind.kind == "group_norm"}


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
@pytest.mark.parametrize(("time", "silu"), [("default", True), ("scale_shift", False)])
def test_a_residual_block(time: str, silu: bool, place: str) -> None:
    with running_on(place) as device:
        block = Block(time).to(device)
        compare(block, torch.randn(2, 16, 3, 5, device=device), torch.randn(2, 16, 1, 1, device=device))
        assert kinds(block) == {"norm1": True, "norm2": silu}
        assert isinstance(block.nonlinearity, nn.SiLU) and isinstance(block.norm1, nn.GroupNorm)
        torch.testing.assert_close(block.nonlinearity(torch.ones(3)), F.silu(torch.ones(3)))
        unpatch(block)
        assert type(block.norm1) is nn.GroupNorm and type(block.nonlinearity) is nn.SiLU


@pytest.mark.parametrize("make", [Reads, Twice])
def test_results_with_other_readers(make: type) -> None:
    model = make()
    compare(model, torch.randn(2, 16, 3, 5))
    assert kinds(model) == {"norm1": False, "norm2": False}


def test_what_computes_something_else_is_left_alone() -> None:
    model = nn.Sequential(Own(2, 8), nn.GroupNorm(2, 8), nn.SiLU())
    report = patch(model)
    assert kinds(model) == {"1": False} and "none of our ops" in str(report)


def test_watched_norms_compute_the_norm_alone() -> None:
    block, seen = Block(), []
    patch(block)
    block.norm1.register_forward_hook(lambda m, args, y: seen.append(y))
    x = torch.randn(2, 16, 3, 5)
    y = block(x)
    torch.testing.assert_close(seen[0], F.group_norm(x, 4, block.norm1.weight, block.norm1.bias))
    unpatch(block)
    torch.testing.assert_close(block(x), y, rtol=1e-4, atol=1e-5)


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
    assert _behind(block, "norm1") == _behind(block, "norm2") == "nonlinearity"
    compare(block, torch.randn(2, 16, 4, 4), torch.randn(2, 8))
    assert kinds(block) == {"norm1": True, "norm2": True}
    block = resnet.ResnetBlock2D(
        in_channels=16, out_channels=16, temb_channels=8, groups=4, time_embedding_norm="scale_shift"
    )
    compare(block, torch.randn(2, 16, 4, 4), torch.randn(2, 8))
    assert kinds(block) == {"norm1": True, "norm2": False}
