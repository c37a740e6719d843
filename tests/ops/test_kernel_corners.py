"""Kernels where they have corners: second stretches, several rows of a block, long rows, saturated and odd numbers.

The cheapest calls that distinguish kernels from their mutants (docs/mutation.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import poisoned, running_on
from support.inference import assert_like_reference, normal_numbers
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels.runtime import layout
from rtkernels.runtime.launch.plans import Plans

BF16, FP32, INF = torch.bfloat16, torch.float32, float("inf")
normal = normal_numbers(0)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    return rtkernels.act(y, "silu", out=y)


def gradients(call: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    given = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = call(*given)
    slopes = torch.sin(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, given, slopes)]


def in_floats(call: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Return a call whose integers come as floats, which are exact here."""
    return lambda *args, **options: [t.float() for t in call(*args, **options) if t is not None]


def with_last(x: Tensor, value: float) -> Tensor:
    x[-1, -1] = value
    return x


def few_positive(rows: int, cols: int) -> Tensor:
    x = -1 - torch.rand(rows, cols)
    x[:, 5], x[:, 300], x[:, cols - 1] = 1.0, 2.0, 3.0
    return x


# Where, the op, arguments, options. Rows of long ones do not fit into registers, and are more than blocks.
CALLS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "gelu": ("sm_90", rtkernels.act, (normal(3, 48), "gelu_erf"), {}),
    "a bias in fp32": ("sm_90", rtkernels.act, (normal(3, 64, dtype=FP32), "silu"), {"add": normal(64, dtype=FP32)}),
    "relu": ("sm_90", rtkernels.act, (normal(3, 48), "relu"), {}),
    "a long row in place": ("sm_90", in_place, (normal(1, 40_000),), {}),
    "many odd rows": ("sm_90", rtkernels.glu, (normal(300, 10),), {}),
    "factors of almost nothing": (
        "sm_90", rtkernels.glu_smooth_fp8, (normal(3, 256), torch.tensor([0.0, 1e-40] + 126 * [1.0])), {}),
    "lists of wide matrices": ("sm_90", rtkernels.transpose, ([normal(70, 150) for _ in range(3)],), {}),
    "long mxfp8": ("sm_90", rtkernels.dequantize_mxfp8, rtkernels.quantize_mxfp8(normal(3, 4096)), {}),
    "codes of mxfp8": ("sm_90", rtkernels.quantize_mxfp8, (normal(5, 64),), {}),
    "rows of a block and a part, mxfp8": (
        "sm_90", rtkernels.dequantize_mxfp8, rtkernels.quantize_mxfp8(normal(5, 40)), {}),
    "rows of blocks and a part, nvfp4": (
        "sm_90", rtkernels.dequantize_nvfp4, rtkernels.quantize_nvfp4(normal(5, 40), global_scale=1.0)[:2], {}),
    "mxfp4": ("sm_90", rtkernels.quantize_mxfp4, (normal(5, 64),), {"codes": 0.0}),
    "tiny numbers, nvfp4": (
        "sm_90", rtkernels.quantize_nvfp4, (1e-35 * normal(5, 64, dtype=FP32),), {"global_scale": 1e-36}),
    "odd tensors": ("sm_90", rtkernels.quantize_fp8, (with_last(normal(301, 37), 40.0),), {"granularity": "tensor"}),
    "infinite weights": (
        "sm_90", rtkernels.rms_norm_fp8, (normal(3, 2048), with_last(torch.ones(1, 2048), INF)[0].to(BF16)), {}),
    "three of eight are positive": ("sm_90", in_floats(rtkernels.topk), (few_positive(3, 2000), 8), {}),
    "logits that differ in their last bits": (
        "sm_90", in_floats(rtkernels.topk_router), (1 + torch.arange(768.0).flip(0).view(2, 384) * 2.0**-23, 4), {}),
    "many of logits that differ in their last bits": (
        "sm_90", in_floats(rtkernels.topk_router), (1 + torch.arange(200.0).view(2, 100) * 2.0**-23, 40),
        {"score_first": False}),
    "heads with a part that is not turned": (
        "sm_90", rtkernels.qkv_split, (normal(3, 4 * 68), 2, 1),
        {"rope": (normal(3, 32, dtype=FP32), normal(3, 32, dtype=FP32))}),
    "groups behind the last row": (
        "sm_90", rtkernels.grouped_mm, (normal(70, 64), normal(3, 32, 64)),
        {"offs": torch.tensor([10, 50, 300], dtype=torch.int32)}),
    "groups that begin behind the last row": (
        "sm_90", rtkernels.grouped_mm, (normal(70, 64), normal(3, 32, 64)),
        {"offs": torch.tensor([10, 90, 300], dtype=torch.int32)}),
    "groups that begin before the first row": (
        "sm_90", rtkernels.grouped_mm, (normal(70, 64), normal(3, 32, 64)),
        {"offs": torch.tensor([-5, 50, 70], dtype=torch.int32)}),
    "gradients of wide rows": (
        "sm_80", lambda *a: gradients(rtkernels.rms_norm, *a), (normal(9, 6144), normal(6144)), {}),
    "gradients of long rows": (
        "sm_90", lambda *a: gradients(rtkernels.rms_norm, *a), (normal(100, 1027), normal(1027)), {}),
    "long softmax": ("sm_90", lambda *a: gradients(rtkernels.softmax, *a), (normal(100, 9001, dtype=FP32),), {}),
    "long gates": (
        "sm_90", lambda x, g, w: gradients(lambda *a: rtkernels.group_rms_norm_gate(*a, groups=2), x, g, w),
        (normal(50, 2 * 1027), normal(50, 2 * 1027), normal(2 * 1027)), {}),
    "rows in registers": ("sm_90", rtkernels.quantize_fp8, (normal(9, 256),), {"granularity": "row"}),
    "smooth rows": ("sm_90", rtkernels.quantize_fp8_smooth, (normal(100, 512), torch.rand(512) + 0.5), {}),
}  # fmt: skip


@at("sm_90")
@pytest.mark.parametrize("name", CALLS)
def test_as_the_reference(place: str, name: str) -> None:
    where, call, args, options = CALLS[name]
    assert_like_reference(where, call, *args, **options)


@at("sm_90")
@pytest.mark.parametrize(
    "name", ["gradients of long rows", "long softmax", "long gates", "rows in registers", "smooth rows"]
)
def test_blocks_walk_on_where_a_grid_cannot_be_larger(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has several groups of rows, one after the other, and they alternate shared scratch."""
    where, call, args, options = CALLS[name]
    few = tuple(a[:9] if a.dim() == 2 else a for a in args)
    monkeypatch.setattr(layout, "GRID_LIMIT", 2)
    Plans.forget_all()
    assert_like_reference(where, call, *few, **options)
    Plans.forget_all()


@at("sm_90")
def test_gradient_of_rows_far_from_zero(place: str) -> None:
    """The mean is a thousand times the deviation: only the subtraction of the mean may cancel."""
    x = (4096 + torch.randn(5, 72)).requires_grad_()
    scale, g = torch.randn(5, 72), torch.randn(5, 72)
    want = torch.autograd.grad(
        torch.nn.functional.layer_norm(x.double(), (72,)) * (1 + scale.double()), x, g.double(), allow_unused=True
    )[0]
    with running_on(place), poisoned():
        y = rtkernels.layer_norm(x, None, None, scale=scale, shift=torch.zeros(5, 72))
        got = torch.autograd.grad(y, x, g)[0]
    assert (got.double() - want).abs().max() < 2e-3 * want.abs().max()
