"""Convolutions: depthwise ones at every window, patches, and what torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_close, running_on
from support.places import DTYPES, at
from torch import Tensor

import rtkernels
from rtkernels import ArgumentError
from rtkernels.ops.conv.conv import OP
from rtkernels.ops.conv.depthwise import DEPTHWISE as KERNEL
from rtkernels.runtime.targets import parse

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
# Input, multiple of channels, window, options.
DEPTHWISE: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 5, 11, 13), 1, (3, 3), {"padding": 1}),
    "3x3, stride 2": ((1, 3, 9, 10), 1, (3, 3), {"stride": 2}),
    "5x5": ((1, 3, 9, 6), 1, (5, 5), {"padding": 2}),
    "5x5, stride 2, two channels of each": ((1, 2, 12, 9), 2, (5, 5), {"padding": 2, "stride": 2}),
    "7x7": ((1, 2, 9, 14), 1, (7, 7), {"padding": 3}),
    "7x7, stride 2": ((1, 2, 14, 9), 1, (7, 7), {"padding": 3, "stride": 2}),
    "no padding": ((1, 2, 7, 7), 1, (7, 7), {}),
    "more padding than the window": ((1, 2, 3, 3), 1, (3, 3), {"padding": 4}),
    "strides of their own": ((1, 2, 9, 10), 1, (3, 3), {"padding": (0, 2), "stride": (1, 2)}),
    "dilated": ((2, 3, 9, 12), 1, (3, 3), {"padding": 2, "dilation": 2}),
    "same": ((1, 3, 8, 9), 1, (3, 5), {"padding": "same"}),
    "one dimension": ((2, 4, 21), 1, (11,), {"padding": 5}),
    "three dimensions": ((1, 2, 5, 6, 7), 2, (3, 2, 3), {"padding": 1, "stride": (1, 2, 1)}),
    "one channel": ((2, 1, 6, 7), 1, (3, 3), {"padding": 1}),
}
PATCHES = {
    "patches": ((2, 3, 29, 30), 8, (14, 14)),
    "3-d patches": ((1, 3, 4, 8, 12), 16, (2, 4, 4)),
    "1-d patches": ((2, 8, 33), 8, (4,)),
}


def tensors(
    shape: tuple[int, ...], out: int, window: tuple[int, ...], groups: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, (out, shape[1] // groups, *window), (out,))
    return [torch.randn(each, generator=generator).to(dtype).to(device) for each in shapes]


def results(convolution: Any, given: list[Tensor], dy: Tensor, groups: int, kw: dict[str, Any]) -> list[Tensor]:
    """Return the convolution, and the gradients of all that is given."""
    given = [t.detach().requires_grad_() for t in given]
    y = convolution(*given, groups=groups, **kw)
    return [y.detach(), *torch.autograd.grad(y, given, dy.to(y))]


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, kw: dict[str, Any]) -> None:
    c = 8.0 if x.dtype == torch.float32 else 2.0
    given = [t for t in (x, weight, bias) if t is not None]
    theirs, exact = CONV[x.dim() - 2], [t.detach().cpu().double() for t in given]
    with torch.no_grad():
        y = rtkernels.conv(*given, groups=groups, **kw)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    mine = results(rtkernels.conv, given, dy, groups, kw)
    expected = results(theirs, exact, dy.double(), groups, kw)
    sums = results(theirs, [t.abs() for t in exact], dy.double().abs(), groups, kw)
    assert y.dtype == x.dtype and torch.equal(y, mine[0])
    for got, wanted, scale, what in zip(mine, expected, sums, ("y", "dx", "dweight", "dbias"), strict=False):
        assert_close(got.cpu(), wanted, c=c, scale=scale, what=what)


@at()
@pytest.mark.parametrize("case", DEPTHWISE)
def test_depthwise(case: str, place: str) -> None:
    shape, multiple, window, kw = DEPTHWISE[case]
    for dtype in DTYPES if case == "3x3" else DTYPES[:1]:
        with running_on(place) as device:
            compare(*tensors(shape, shape[1] * multiple, window, shape[1], dtype, device), shape[1], kw)


@at()
def test_any_strides_and_no_bias(place: str) -> None:
    with running_on(place) as device:
        x, weight, _ = tensors((2, 3, 9, 10), 3, (3, 3), 3, torch.float32, device)
        for given in (
            x.to(memory_format=torch.channels_last),
            x.transpose(2, 3),
            x[:, :, ::2, 1:],
            x[:1].expand(2, 3, 9, 10),
        ):
            compare(given, weight, None, 3, {"padding": 1})
        compare(x, weight.transpose(2, 3), None, 3, {"padding": 1})


@at("cpu", "sm_80")
@pytest.mark.parametrize("case", PATCHES)
def test_patches(case: str, place: str) -> None:
    shape, out, window = PATCHES[case]
    with running_on(place) as device:
        compare(*tensors(shape, out, window, 1, torch.bfloat16, device), 1, {"stride": window})
        compare(*tensors(shape, out, window, 1, torch.float32, device), 1, {"stride": window})


def test_patches_have_channels_last_results() -> None:
    x, weight, bias = tensors((2, 8, 6, 6), 16, (2, 2), 1, torch.bfloat16, "cpu")
    with rtkernels.emulate("sm_80"):
        assert rtkernels.conv(x, weight, bias, stride=2).is_contiguous(memory_format=torch.channels_last)


def test_others_are_torchs() -> None:
    x, weight, bias = tensors((2, 4, 8, 9), 6, (3, 3), 2, torch.float32, "cpu")
    assert torch.equal(
        rtkernels.conv(x, weight, bias, padding=1, groups=2), F.conv2d(x, weight, bias, padding=1, groups=2)
    )
    with rtkernels.batch_invariant(1), pytest.raises(ArgumentError, match="not batch-invariant"):
        rtkernels.conv(x, weight, bias, groups=2)


def test_gradients_with_batch_invariance() -> None:
    x, weight, _ = tensors((1, 2, 8, 9), 2, (3, 3), 2, torch.float32, "cpu")
    for level, stride, told in ((2, 2, "torch's at this stride"), (3, 1, "is not batch-invariant")):
        with rtkernels.batch_invariant(level), pytest.raises(ArgumentError, match=told):
            rtkernels.conv(x.requires_grad_(), weight.requires_grad_(), stride=stride, groups=2).sum().backward()


def test_empty_batches_and_out() -> None:
    x, weight, bias = tensors((2, 4, 8, 9), 4, (3, 3), 4, torch.float32, "cpu")
    for target in ("sm_80", "sm_90"):
        with rtkernels.emulate(target):
            assert rtkernels.conv(x[:0], weight, bias, groups=4).shape == (0, 4, 6, 7)
            out = torch.empty(2, 4, 6, 7)
            assert rtkernels.conv(x, weight, bias, groups=4, out=out) is out
            assert torch.equal(out, rtkernels.conv(x, weight, bias, groups=4))


def test_wrong_arguments() -> None:
    x, weight, bias = tensors((2, 4, 8, 9), 4, (3, 3), 4, torch.float32, "cpu")
    for given, kw, told in (
        ((x[0], weight), {}, "x has shape"),
        ((x, weight.half()), {}, "weight is torch.float16"),
        ((x, weight), {"groups": 3}, "groups is 3"),
        ((x, weight), {"groups": 2}, "weight has shape"),
        ((x, weight, bias[:3]), {"groups": 4}, "bias has shape"),
        ((x, weight), {"groups": 4, "stride": 0}, "stride is 0"),
        ((x, weight), {"groups": 4, "dilation": (1, 1, 1)}, "dilation is"),
        ((x, weight), {"groups": 4, "padding": "full"}, "padding is 'full'"),
        ((x, weight), {"groups": 4, "padding": "same", "stride": 2}, "padding is 'same'"),
        ((x, weight), {"groups": 4, "dilation": 5}, "x has sizes"),
    ):
        with pytest.raises(ArgumentError, match=told):
            rtkernels.conv(*given, **kw)


def emulated_coverage() -> None:
    for token, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        for k, s in {variant[1:] for variant in KERNEL.variants(parse("sm_90a")) if variant[0] == token}:
            x, weight, _ = tensors((1, 2, 8, 9), 2, (k, k), 2, dtype, "cpu")
            with rtkernels.emulate("sm_90"):
                given = [t.requires_grad_() for t in (x, weight)]
                rtkernels.conv(*given, padding=k // 2, stride=s, groups=2).sum().backward()


def test_the_op_lists_its_kernels() -> None:
    assert [kernel.name for kernel in OP.kernels] == ["depthwise_conv"]
