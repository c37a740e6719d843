"""Depthwise convolutions of square windows in two dimensions: record, plan and operator."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps

WINDOWS = ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2))  # sizes and strides that kernels are compiled for
_THREADS, _ACROSS, _DOWN = 256, 4, 4  # as in cuda_src/conv/depthwise.cu
DEPTHWISE = Kernel(
    "conv/depthwise.cu", "depthwise_conv", template="T K S", max_registers=128,
    args="x:ptr weight:ptr bias:ptr y:ptr count:i64 channels:i64 multiple:i64 height:i64 width:i64 out_height:i64 "
    "out_width:i64 x_batch:i64 x_channel:i64 x_row:i64 x_column:i64 pad_h:i64 pad_w:i64 flipped:i64",
    variants=[(t, *window) for t in ("bf16", "fp16", "fp32") for window in WINDOWS],
)  # fmt: skip


def _out_sizes(x: Meta, weight: Meta, stride: int, pad_h: int, pad_w: int) -> tuple[int, int]:
    k = weight.shape[2]
    return (x.shape[2] + 2 * pad_h - k) // stride + 1, (x.shape[3] + 2 * pad_w - k) // stride + 1


def _check(x: Meta, weight: Meta, bias: Meta | None, stride: int, pad_h: int, pad_w: int, flipped: bool) -> None:
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1] != 1 or weight.shape[0] % max(x.shape[1], 1):
        raise ArgumentError(
            f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; expected [multiple of channels, 1, k, k] "
            "and [n, channels, height, width]"
        )
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ArgumentError(f"weight is {weight.dtype} and x {x.dtype}; expected one dtype for x, weight and bias")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},)")
    if weight.shape[2] != weight.shape[3] or (weight.shape[2], stride) not in WINDOWS:
        sizes = ", ".join(f"{k} by {s}" for k, s in WINDOWS)
        raise ArgumentError(f"weight has windows {tuple(weight.shape[2:])}, stride is {stride}; expected {sizes}")
    if flipped and (stride != 1 or weight.shape[0] != x.shape[1]):
        raise ArgumentError(f"flipped is True and stride is {stride}; expected 1, and as many windows as channels")
    if min(_out_sizes(x, weight, stride, pad_h, pad_w)) < 1:
        raise ArgumentError(f"x has sizes {tuple(x.shape[2:])}; expected at least those of the window")
    if max(*x.shape[2:], abs(pad_h), abs(pad_w)) >= 1 << 24:
        raise ArgumentError(f"x has sizes {tuple(x.shape[2:])} and padding {pad_h, pad_w}; expected less than 2^24")


def _plan(
    x: Meta, weight: Meta, bias: Meta | None, stride: int, pad_h: int, pad_w: int, flipped: bool, device: int
) -> Steps:
    batch, channels, height, width = x.shape
    out = _out_sizes(x, weight, stride, pad_h, pad_w)
    count = batch * weight.shape[0] * -(-out[0] // _DOWN) * -(-out[1] // _ACROSS)
    blocks = -(-count // _THREADS)
    if blocks > GRID_LIMIT:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)}, more tiles than a grid has blocks; expected a smaller batch"
        )
    launch = DEPTHWISE.bind((x.token, weight.shape[2], stride), device, blocks, _THREADS)
    names = ("x", "weight", 0 if bias is None else "bias", "y")
    sizes = (count, channels, weight.shape[0] // channels, height, width, *out)
    return Steps(Step(launch, *names, *sizes, *x.stride, pad_h, pad_w, int(flipped)))


def _outputs(x: Meta, weight: Meta, stride: int, pad_h: int, pad_w: int) -> tuple[Memory]:
    return (Memory((x.shape[0], weight.shape[0], *_out_sizes(x, weight, stride, pad_h, pad_w)), x.dtype),)


def _reference(x, weight, bias, stride, pad_h, pad_w, flipped) -> Tensor:
    weight = weight.flip(2, 3) if flipped else weight
    x = torch.nn.functional.pad(x.float(), (pad_w, pad_w, pad_h, pad_h))  # negative ones cut off
    y = torch.conv2d(x, weight.float(), None if bias is None else bias.float(), stride, groups=x.shape[1])
    return y.to(weight.dtype).contiguous()


FORWARD = Operator(
    "depthwise_conv", (Argument("x"), Dense("weight"), Dense("bias", optional=True)),
    options="int stride, int pad_h, int pad_w, bool flipped", results="y", outputs=_outputs, plan=_plan,
    reference=_reference, check=_check,
)  # fmt: skip
