"""Depthwise convolutions in three dimensions, and their gradients: records, plans and operators."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps

# As in cuda_src/conv/depthwise.cu.
_THREADS, _ACROSS, _DOWN, _TAPS = 256, 4, 4, 8
_TYPES = ("bf16", "fp16", "fp32")
_UNROLLED = ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2))  # windows and strides that are known when compiled
_SIZES = "depth:i64 height:i64 width:i64 out_depth:i64 out_height:i64 out_width:i64"
_STRIDES = "x_batch:i64 x_channel:i64 x_depth:i64 x_row:i64 x_column:i64"
_WINDOW = " ".join(f"{what}_{d}:i64" for what in ("kernel", "stride", "pad", "dilation") for d in "dhw")
FWD = Kernel(
    "conv/depthwise.cu", "depthwise_fwd", template="T K S", max_registers=128,
    args=f"x:ptr weight:ptr bias:ptr y:ptr count:i64 channels:i64 multiple:i64 {_SIZES} {_STRIDES} {_WINDOW} "
    "flipped:i64",
    variants=[(t, k, s) for t in _TYPES for k, s in ((0, 0), *_UNROLLED)],
)  # fmt: skip
BWD_INPUT = Kernel(
    "conv/depthwise.cu", "depthwise_bwd_input", template="T", max_registers=80,
    args=f"dy:ptr weight:ptr dx:ptr count:i64 channels:i64 multiple:i64 {_SIZES} {_WINDOW}",
    variants=[(t,) for t in _TYPES],
)  # fmt: skip
BWD_WEIGHT = Kernel(
    "conv/depthwise.cu", "depthwise_bwd_weight", template="T", max_registers=96,
    args=f"dy:ptr x:ptr dw:ptr db:ptr batch:i64 channels:i64 multiple:i64 {_SIZES} {_STRIDES} {_WINDOW}",
    variants=[(t,) for t in _TYPES],
)  # fmt: skip
KERNELS = (FWD, BWD_INPUT, BWD_WEIGHT)
_OPTIONS = "int sd, int sh, int sw, int pd, int ph, int pw, int dd, int dh, int dw"
Window = tuple[int, int, int, int, int, int, int, int, int]


def out_sizes(sizes: tuple[int, ...], kernel: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
    """Return depth, height and width of a result. `window`: strides, padding and dilation of the three dimensions."""
    stride, pad, dilation = window[:3], window[3:6], window[6:]
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(sizes, kernel, stride, pad, dilation, strict=True)
    )


def _check(x: Meta, weight: Meta, bias: Meta | None, sd, sh, sw, pd, ph, pw, dd, dh, dw) -> None:
    if x.dim() != 5 or weight.dim() != 5 or weight.shape[1] != 1 or weight.shape[0] % max(x.shape[1], 1):
        raise ArgumentError(
            f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; expected a multiple of channels and 1 "
            "in five dimensions"
        )
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ArgumentError(f"weight is {weight.dtype} and x {x.dtype}; expected one dtype for x, weight and bias")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},)")
    window = (sd, sh, sw, pd, ph, pw, dd, dh, dw)
    if min(sd, sh, sw, dd, dh, dw) < 1 or min(pd, ph, pw) < 0 or min(weight.shape[2:]) < 1:
        raise ArgumentError(f"stride, padding, dilation are {window}; expected strides and dilations above 0")
    if min(out_sizes(x.shape[2:], weight.shape[2:], window)) < 1:
        raise ArgumentError(f"x has sizes {tuple(x.shape[2:])}; expected at least those of the window")
    if max(*x.shape[2:], *weight.shape[2:], *window) >= 1 << 24 or weight.shape[0] > GRID_LIMIT:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected sizes below 2^24")


def _blocks(count: int) -> int:
    if -(-count // _THREADS) > GRID_LIMIT:
        raise ArgumentError(f"a result has {count} elements, more than one grid has; expected a smaller batch")
    return -(-count // _THREADS)


def _forward(
    names: tuple[str | int, ...], x: tuple, channels: int, multiple: int, sizes: tuple, out: tuple, kernel: tuple,
    window: Window, token: str, flipped: bool, device: int,
) -> Step:  # fmt: skip
    """Return a launch of ``depthwise_fwd``; `x`: batch and strides of the input."""
    batch, *strides = x
    same = kernel[0] == 1 and out[0] == sizes[0] and window[0] == 1 and window[3] == 0
    pair = (kernel[1], window[1])
    unrolled = same and pair in _UNROLLED and kernel[1] == kernel[2] and window[1] == window[2] and window[7:] == (1, 1)
    variant = (token, *pair) if unrolled else (token, 0, 0)
    down = _DOWN if unrolled else 1
    count = batch * channels * multiple * out[0] * -(-out[1] // down) * -(-out[2] // _ACROSS)
    launch = FWD.bind(variant, device, _blocks(count), _THREADS)
    return Step(launch, *names, count, channels, multiple, *sizes, *out, *strides, *kernel, *window, int(flipped))


def _plan(x: Meta, weight: Meta, bias: Meta | None, sd, sh, sw, pd, ph, pw, dd, dh, dw, device: int) -> Steps:
    window = (sd, sh, sw, pd, ph, pw, dd, dh, dw)
    out = out_sizes(x.shape[2:], weight.shape[2:], window)
    names = ("x", "weight", 0 if bias is None else "bias", "y")
    channels = x.shape[1]
    return Steps(
        _forward(
            names, (x.shape[0], *x.stride), channels, weight.shape[0] // channels, tuple(x.shape[2:]), out,
            tuple(weight.shape[2:]), window, x.token, False, device,
        )
    )  # fmt: skip


def _outputs(x: Meta, weight: Meta, sd, sh, sw, pd, ph, pw, dd, dh, dw) -> tuple[Memory]:
    out = out_sizes(x.shape[2:], weight.shape[2:], (sd, sh, sw, pd, ph, pw, dd, dh, dw))
    return (Memory((x.shape[0], weight.shape[0], *out), x.dtype),)


def _reference(x, weight, bias, sd, sh, sw, pd, ph, pw, dd, dh, dw) -> Tensor:
    window = (sd, sh, sw, pd, ph, pw, dd, dh, dw)
    added = None if bias is None else bias.float()
    y = torch.conv3d(x.float(), weight.float(), added, window[:3], window[3:6], window[6:], x.shape[1])
    return y.to(x.dtype).contiguous()


FORWARD = Operator(
    "depthwise_conv_fwd", (Argument("x"), Dense("weight"), Dense("bias", optional=True)), options=_OPTIONS, results="y",
    outputs=_outputs, plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


def _check_backward(dy: Meta, x: Meta, weight: Meta, sd, sh, sw, pd, ph, pw, dd, dh, dw) -> None:
    _check(x, weight, None, sd, sh, sw, pd, ph, pw, dd, dh, dw)
    expected = _outputs(x, weight, sd, sh, sw, pd, ph, pw, dd, dh, dw)[0].shape
    if tuple(dy.shape) != tuple(expected) or dy.dtype != x.dtype:
        raise ArgumentError(f"dy is {dy.dtype} {tuple(dy.shape)}; expected {x.dtype} {tuple(expected)}")


def _plan_backward(
    dy: Meta, x: Meta, weight: Meta, sd, sh, sw, pd, ph, pw, dd, dh, dw, need_x, need_weight, need_bias, device: int
) -> Steps:
    window = (sd, sh, sw, pd, ph, pw, dd, dh, dw)
    sizes, kernel, out = tuple(x.shape[2:]), tuple(weight.shape[2:]), tuple(dy.shape[2:])
    channels = x.shape[1]
    multiple = weight.shape[0] // channels
    steps = []
    if need_x and multiple == 1 and (sd, sh, sw) == (1, 1, 1):
        pads = tuple(d * (k - 1) - p for d, k, p in zip(window[6:], kernel, window[3:6], strict=True))
        about = (1, 1, 1, *pads, *window[6:])
        flat = (dy.shape[0], *dy.stride)
        names = ("dy", "weight", 0, "dx")
        steps.append(_forward(names, flat, channels, 1, out, sizes, kernel, about, x.token, True, device))
    elif need_x:
        count = x.numel()
        launch = BWD_INPUT.bind((x.token,), device, _blocks(count), _THREADS)
        steps.append(Step(launch, "dy", "weight", "dx", count, channels, multiple, *sizes, *out, *kernel, *window))
    if need_weight or need_bias:
        rows, parts = (kernel[0] * kernel[1], -(-kernel[2] // _TAPS)) if need_weight else (1, 1)
        launch = BWD_WEIGHT.bind((x.token,), device, (weight.shape[0], rows, parts), _THREADS)
        names = ("dy", "x", "dweight" if need_weight else 0, "dbias" if need_bias else 0)
        numbers = (x.shape[0], channels, multiple, *sizes, *out, *x.stride, *kernel, *window)
        steps.append(Step(launch, *names, *numbers))
    return Steps(*steps)


def _backward_outputs(x: Meta, weight: Meta, need_x, need_weight, need_bias) -> tuple[Memory | None, ...]:
    return (
        Memory(tuple(x.shape), x.dtype) if need_x else None,
        Memory(tuple(weight.shape), x.dtype) if need_weight else None,
        Memory((weight.shape[0],), x.dtype) if need_bias else None,
    )


def _backward_reference(
    dy, x, weight, sd, sh, sw, pd, ph, pw, dd, dh, dw, need_x, need_weight, need_bias
) -> tuple[Tensor | None, ...]:
    window, needs = (sd, sh, sw, pd, ph, pw, dd, dh, dw), [need_x, need_weight, need_bias]
    found = torch.ops.aten.convolution_backward(
        dy.float(), x.float(), weight.float(), [weight.shape[0]], window[:3], window[3:6], window[6:], False, [0, 0, 0],
        x.shape[1], needs,
    )  # fmt: skip
    absent = torch.empty(0)
    return tuple(t.to(x.dtype).contiguous() if need else absent for t, need in zip(found, needs, strict=True))


BACKWARD = Operator(
    "depthwise_conv_bwd", (Dense("dy"), Argument("x"), Dense("weight")),
    options=_OPTIONS + ", bool need_x, bool need_weight, bool need_bias", results="dx dweight dbias",
    outputs=_backward_outputs, plan=_plan_backward, reference=_backward_reference, check=_check_backward,
)  # fmt: skip
