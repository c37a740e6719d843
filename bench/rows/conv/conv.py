"""Benchmark rows of ``conv``: depthwise at the sizes of ConvNeXt and MobileNet, patches at those of vision towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from bench.rows.row import Row
from rtkernels.ops.conv.depthwise import FORWARD

_DEPTHWISE = (
    ((32, 192, 56, 56), 7, 1), ((32, 384, 28, 28), 7, 1), ((32, 144, 56, 56), 3, 1), ((32, 144, 112, 112), 3, 2),
)  # fmt: skip
_PATCHES = (((8, 3, 224, 224), 1024, 14), ((32, 3, 384, 384), 768, 16))


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    image, weight = x[:, :256].reshape(-1, 16, 16, 16), x[0, :144].reshape(16, 1, 3, 3)
    return {"conv": lambda: rtkernels.conv(image, weight, padding=1, groups=16)}


def rows() -> Iterator[Row]:
    for shape, k, stride in _DEPTHWISE:
        yield from _depthwise(shape, k, stride)
    for shape, out, k in _PATCHES:
        yield _patches(shape, out, k)


def _depthwise(shape: tuple[int, ...], k: int, stride: int) -> Iterator[Row]:
    n, c, h, w = shape
    title = f"{n}x{c}x{h}x{w}, {k}x{k}, stride {stride}"
    out = (n, c, -(-h // stride), -(-w // stride))
    elements = n * c * (h * w + out[2] * out[3])

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        x, weight, dy = (
            torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
            for size in (shape, (c, 1, k, k), out)
        )
        return {"x": x, "weight": weight, "dy": dy}

    def forward(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return F.conv2d(x, weight, stride=stride, padding=k // 2, groups=c)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return rtkernels.conv(x, weight, stride=stride, padding=k // 2, groups=c)

    def backward(x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        return FORWARD(dy, weight, None, 1, k // 2, k // 2, True)

    yield Row(
        name="conv_depthwise_fwd", shape=title, make=lambda *a: {n: t for n, t in make(*a).items() if n != "dy"},
        ours=ours, torch=forward, bytes=2 * elements,
    )  # fmt: skip
    if stride == 1:  # the gradient of x alone: that of the weight is torch's
        yield Row(
            name="conv_depthwise_dx", shape=title, make=make, ours=backward,
            torch=lambda x, weight, dy: F.conv2d(dy, weight.flip(2, 3), padding=k // 2, groups=c), bytes=2 * elements,
        )  # fmt: skip


def _patches(shape: tuple[int, ...], out: int, k: int) -> Row:
    n, c, h, w = shape
    rows_of, depth = n * (h // k) * (w // k), c * k * k

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        x, weight, bias = (
            torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
            for size in (shape, (out, c, k, k), (out,))
        )
        return {"x": x, "weight": weight, "bias": bias}

    return Row(
        name="conv_patches", shape=f"{n}x{c}x{h}x{w}, {out}, {k}x{k}", make=make,
        ours=lambda x, weight, bias: rtkernels.conv(x, weight, bias, stride=k),
        torch=lambda x, weight, bias: F.conv2d(x, weight, bias, stride=k),
        bytes=2 * (n * c * h * w + rows_of * out + out * depth), flops=2 * rows_of * depth * out,
    )  # fmt: skip
