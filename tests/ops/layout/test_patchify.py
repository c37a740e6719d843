"""patchify and repeat_heads: kernels, values, gradients, errors; what a device can do, and scratch memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.inference import EVERYWHERE, assert_captures, assert_like_reference, normal_numbers
from support.places import error_tests
from torch import Tensor

import rtkernels
from rtkernels import patchify, repeat_heads

normal = normal_numbers(0)


def gradient(x: Tensor, dy: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(repeat_heads(leaf, 3), leaf, dy)[0]


@EVERYWHERE
def test_kernels(where: str) -> None:
    assert_like_reference(where, patchify, normal(2, 28, 30, 3), 14)
    assert_like_reference(where, patchify, normal(1, 3, 9, 8), (3, 4), img_layout="nchw", order="chw")
    assert_like_reference(where, repeat_heads, normal(3, 2, 16), 4)
    assert_like_reference(where, repeat_heads, normal(3, 2, 5), 3)
    assert_like_reference(where, gradient, normal(4, 2, 16), normal(4, 6, 16))


@pytest.mark.slow
@EVERYWHERE
def test_kernels_of_bytes(where: str) -> None:
    pixels = torch.randint(0, 256, (1, 14, 14, 3), dtype=torch.uint8)
    assert_like_reference(where, patchify, pixels, 7, lut=torch.linspace(-1, 1, 256).bfloat16())


def test_patches_and_their_gradient() -> None:
    img = normal(2, 3, 7, 7, dtype=torch.float32).requires_grad_()
    wanted = F.unfold(img[:, :, :6, :6], (3, 2), stride=(3, 2)).transpose(1, 2)
    dy = torch.randn(wanted.shape)
    for layout, given in (("nchw", img), ("nhwc", img.permute(0, 2, 3, 1))):
        got = patchify(given, (3, 2), img_layout=layout, order="chw")
        assert torch.equal(got, wanted)
        assert torch.equal(*(torch.autograd.grad(t, img, dy, retain_graph=True)[0] for t in (got, wanted)))
    rows = patchify(img.detach(), (3, 2), img_layout="nchw").unflatten(-1, (6, 3)).transpose(-1, -2).flatten(-2)
    assert torch.equal(rows, wanted)


def test_patches_of_bytes() -> None:
    pixels, lut = torch.randint(0, 256, (1, 14, 14, 3), dtype=torch.uint8), torch.linspace(-1, 1, 256)
    assert torch.equal(patchify(pixels, 7, lut=lut), patchify(lut[pixels.int()], 7))


def test_heads_and_their_gradient() -> None:
    x = normal(2, 5, 3, 8, dtype=torch.float32).requires_grad_()
    got, wanted = repeat_heads(x, 4), x.repeat_interleave(4, -2)
    assert torch.equal(got, wanted)
    dy = torch.randn(wanted.shape)
    torch.testing.assert_close(*(torch.autograd.grad(t, x, dy)[0] for t in (got, wanted)))
    out = torch.empty(2, 5, 12, 8)
    assert repeat_heads(x.detach(), 4, out=out) is out and torch.equal(out, wanted)
    assert repeat_heads(x.detach()[:0], 2).shape == (0, 5, 6, 8)
    assert torch.equal(repeat_heads(x.detach(), 1), x)


def test_workspace() -> None:
    space = rtkernels.Workspace("cpu", 4096)
    first = space("a", (4, 8), torch.float32)
    first.fill_(1)
    assert space("a", (4, 8), torch.float32).data_ptr() == first.data_ptr()
    assert space("b", (3,)).data_ptr() >= first.data_ptr() + first.nbytes and space("b", (3,)).data_ptr() % 16 == 0
    with pytest.raises(rtkernels.ArgumentError, match=r"workspace has 4096 bytes .* big needs 8000 more"):
        space("big", (4000,))
    free = rtkernels.Workspace("cpu")
    assert free("x", (0, 5)).shape == (0, 5) and free("x", (7,)).numel() == 7


def test_capabilities_need_a_gpu() -> None:
    with pytest.raises(rtkernels.ArgumentError, match="device is cpu; expected a CUDA device"):
        rtkernels.capabilities("cpu")


@pytest.mark.gpu
def test_capabilities_and_graphs() -> None:
    found = rtkernels.capabilities()
    assert found.sm_count > 0 and found.tma == (found.sm >= 90) and found == rtkernels.capabilities(0)
    img = normal(2, 224, 224, 3).cuda()
    assert_captures(lambda: patchify(img, 14))
    x = normal(968, 8, 128).cuda()
    assert_captures(lambda: repeat_heads(x, 2))


X = torch.ones(1, 8, 8, 3)
BAD = {
    "dimensions": (lambda: patchify(X[0], 2), r"img has shape \(8, 8, 3\); expected four dimensions"),
    "layout": (lambda: patchify(X, 2, img_layout="hwc"), "img_layout is 'hwc'; expected 'nhwc' or 'nchw'"),
    "order": (lambda: patchify(X, 2, order="whc"), "order is 'whc'; expected 'hwc' or 'chw'"),
    "patch": (lambda: patchify(X, 0), "patch is 0; expected sizes above 0"),
    "bytes": (lambda: patchify(X.byte(), 2), "img has dtype uint8; expected one of"),
    "table": (lambda: patchify(X, 2, lut=torch.ones(256)), "lut is torch.float32 .256,. and img torch.float32; expec"),
    "out": (lambda: patchify(X, 2, out=X.clone()), r"out has shape .* expected \(1, 16, 12\)"),
    "heads": (lambda: repeat_heads(torch.ones(3), 2), r"x has shape \(3,\); expected \[..., heads, head_dim\]"),
    "n": (lambda: repeat_heads(X, 0), "n is 0; expected 1 or more"),
}
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(BAD)
