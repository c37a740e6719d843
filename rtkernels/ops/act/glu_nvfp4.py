"""``act(gate) * up * channel_scale`` of gate and up in NVFP4, in one launch. Not public: ``glu`` takes such pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_plan import ACT_TYPES
from rtkernels.ops.act.glu_reference import partner_and_slope, value_and_slope
from rtkernels.ops.quant.nvfp4 import dequantize_nvfp4
from rtkernels.ops.shared.block_formats import swizzled_bytes
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_launch import FORMATS, quant_flags
from rtkernels.ops.shared.row_quant import KINDS, check_results, quantize_reference
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import block_of, check_same, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Argument, Dense, InPlaceExact, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_ACTS = tuple(ACT_TYPES)  # in the order of act/activate_any.cuh
_GATE_SWIZZLED, _UP_SWIZZLED, _FACTOR_FP32 = 1, 2, 4
_KERNEL = Kernel(
    "act/glu_nvfp4.cu", "glu_nvfp4", template="FORMAT ALIGNED", max_registers=128,
    args="gate:ptr gate_scales:ptr gate_global:ptr up:ptr up_scales:ptr up_global:ptr channel_scale:ptr "
    "quant_scale:ptr amax:ptr out:ptr kept:ptr scale_out:ptr global_out:ptr rows:i64 cols:i64 gate_stride:i64 "
    "up_stride:i64 threads_per_row:i64 flags:i64 quant:i64 act:i64 number:f64 floor:f64",
    variants=[(format, aligned) for format in sorted(set(FORMATS.values())) for aligned in (False, True)], tier="serve",
)  # fmt: skip


def _check(
    gate, gate_scales, gate_global, up, up_scales, up_global, channel_scale, quant_scale, out, kept, scale_out,
    global_out, act, quant, swizzled, static,
) -> None:  # fmt: skip
    check_option("act", act, _ACTS)
    check_option("quant", quant, KINDS)
    check_same("up", tuple(up.shape), tuple(gate.shape), "shape", of="x")
    rows, blocks = row_count(gate.shape), -(-2 * gate.shape[-1] // 16)
    for name, codes, scales, number in (("x", gate, gate_scales, gate_global), ("up", up, up_scales, up_global)):
        if codes.dtype != torch.uint8 and codes.dtype != getattr(torch, "float4_e2m1fn_x2", None):
            raise ArgumentError(f"{name}[0] has dtype {codes.dtype}; expected uint8, two codes in a byte")
        shape = (swizzled_bytes(rows, blocks),) if _swizzled(codes, scales) else (*codes.shape[:-1], blocks)
        if scales.dtype not in (torch.float8_e4m3fn, torch.uint8) or tuple(scales.shape) != shape:
            got = f"{scales.dtype} {tuple(scales.shape)}"
            raise ArgumentError(f"{name}[1] is {got}; expected torch.float8_e4m3fn {shape}")
        if number is not None and (number.dtype != torch.float32 or number.numel() != 1):
            raise ArgumentError(f"{name}[2] is {number.dtype} {tuple(number.shape)}; expected one float32 element")
    if channel_scale is not None and channel_scale.dtype not in (torch.float32, torch.bfloat16):
        raise ArgumentError(f"channel_scale has dtype {channel_scale.dtype}; expected float32 or bfloat16")
    shape = (*gate.shape[:-1], 2 * gate.shape[-1])
    if channel_scale is not None:
        check_same("channel_scale", tuple(channel_scale.shape), shape[-1:], "shape", of="a row of the result")
    given = quant_scale is not None or static != 0
    check_results(shape, quant, swizzled, given, out, scale_out, global_out, kept)


def _swizzled(codes: Any, scales: Any) -> bool:
    return scales.dim() == 1 and codes.dim() > 1


def _plan(
    gate, gate_scales, up, up_scales, channel_scale, quant_scale, out, kept, act, quant, swizzled, static, floor, device
) -> Steps:
    rows, cols = row_count(gate.shape), 2 * gate.shape[-1]
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    unfit = cols * 4
    for meta in (out, kept):
        unfit |= 0 if meta is None else meta.misaligned
    flags = _GATE_SWIZZLED * _swizzled(gate, gate_scales) | _UP_SWIZZLED * _swizzled(up, up_scales)
    flags |= _FACTOR_FP32 * (channel_scale is not None and channel_scale.dtype == torch.float32)
    span = -(-cols // 64) * 64 if swizzled else cols
    threads = group_threads(-(-span // (16 if quant == "nvfp4" else 4)), 256)
    groups = block_of(threads) // threads
    padded = -(-rows // 128) * 128 if swizzled else rows
    first, then = quant_flags(quant, out.dtype, swizzled, quant_scale is None and static == 0, torch.float32)
    launch = _KERNEL.bind(
        (FORMATS[quant], unfit % 16 == 0), device, -(-padded // groups), block_of(threads), overlap=True
    )
    tensors = ("gate", "gate_scales", "gate_global", "up", "up_scales", "up_global", "channel_scale", "quant_scale")
    strides = row_stride(gate.shape, gate.stride), row_stride(up.shape, up.stride)
    numbers = (rows, cols, *strides, threads, flags)
    ending = _ACTS.index(act), float(static), float(floor)
    amax = 0 if first is None else "amax"
    results = ("out", "kept", "scale_out", "global_out")
    steps = [
        Step(launch, *tensors, amax, *results, *numbers, mode, *ending) for mode in (first, then) if mode is not None
    ]
    return Steps(*steps, zeros={} if first is None else {"amax": 1})


def _values(codes: Tensor, scales: Tensor, number: Tensor | None) -> Tensor:
    return dequantize_nvfp4(codes, scales, number, swizzled=_swizzled(codes, scales), dtype=torch.float32)


def _reference(
    gate, gate_scales, gate_global, up, up_scales, up_global, channel_scale, quant_scale, out, kept, scale_out,
    global_out, act, quant, swizzled, static, floor,
) -> None:  # fmt: skip
    y = value_and_slope(act, _values(gate, gate_scales, gate_global))[0]
    y = y * partner_and_slope(act, _values(up, up_scales, up_global))[0]
    if channel_scale is not None:
        y = y * channel_scale.float()
    if kept is not None:
        kept.copy_(y)
    quantize_reference(y, quant, out, quant_scale, scale_out, global_out, swizzled, static, floor)


def _written(name: str, optional: bool = True) -> InPlaceExact:
    return InPlaceExact(name, None, optional=optional)


GLU = Operator(
    "glu_nvfp4",
    (
        Rows("gate", None), Dense("gate_scales", None), Argument("gate_global", None, optional=True), Rows("up", None),
        Dense("up_scales", None), Argument("up_global", None, optional=True),
        Dense("channel_scale", None, optional=True), Argument("quant_scale", None, optional=True),
        _written("out", False), _written("kept"), _written("scale_out"), _written("global_out"),
    ),
    options="str act, str quant, bool swizzled, float static, float floor",
    results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip
OP = Op("glu_nvfp4", public=(), kernels=(_KERNEL,), torch_ops=(GLU,), uses=("nvfp4",))
