"""The kernel of ``norm_modulated`` and the choice of a launch."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.row_launch import FORMATS, quant_flags, row_variants
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, block_of, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Step, Steps

_MAX_THREADS = 512
_KERNEL = Kernel(
    "norm/norm_modulated.cu", "norm_modulated", template="T FORMAT ALIGNED", max_registers=128,
    args="x:ptr residual:ptr gate:ptr bias:ptr weight:ptr norm_bias:ptr scale:ptr shift:ptr channel_scale:ptr "
    "quant_scale:ptr amax:ptr out:ptr residual_out:ptr kept:ptr scale_out:ptr global_out:ptr rows:i64 cols:i64 "
    "x_stride:i64 residual_stride:i64 gate_stride:i64 gate_each:i64 scale_stride:i64 scale_each:i64 shift_stride:i64 "
    "shift_each:i64 threads_per_row:i64 flags:i64 quant:i64 eps:f64 offset:f64 number:f64 floor:f64",
    variants=row_variants(), tier="serve",
)  # fmt: skip
KERNELS = (_KERNEL,)
# Flags of norm/norm_modulated.cu.
_CENTRED, _IN_SHARED = 2, 4
_FP32 = {"weight": 8, "norm_bias": 16, "bias": 32, "gate": 64, "scale": 128, "shift": 256, "channel_scale": 512}


def plan(
    x: Meta, residual: Meta | None, gate: Meta | None, bias: Meta | None, weight: Meta | None, norm_bias: Meta | None,
    scale: Meta | None, shift: Meta | None, channel_scale: Meta | None, quant_scale: Meta | None, out: Meta,
    residual_out: Meta | None, kept: Meta | None, scale_out: Meta | None, global_out: Meta | None, eps: float,
    offset: float, centred: bool, quant: str, swizzled: bool, static: float, floor: float, device: int,
) -> Steps:  # fmt: skip
    rows, cols = row_count(x.shape), x.shape[-1]
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    given = {
        "x": x, "residual": residual, "gate": gate, "bias": bias, "weight": weight, "norm_bias": norm_bias,
        "scale": scale, "shift": shift, "channel_scale": channel_scale,
    }  # fmt: skip
    strides, unfit, flags = {}, cols * x.dtype.itemsize, _CENTRED * centred
    for name, meta in given.items():
        stride = 0 if meta is None or row_count(meta.shape) == 1 else row_stride(meta.shape, meta.stride)
        strides[name] = stride, 1 if meta is None else max(rows // max(row_count(meta.shape), 1), 1)
        if meta is not None:
            unfit |= meta.misaligned | stride * meta.dtype.itemsize
            flags |= _FP32.get(name, 0) * (meta.dtype == torch.float32)
    for meta in (out, residual_out, kept):
        unfit |= 0 if meta is None else meta.misaligned
    token, size = DTYPE_TOKEN[x.dtype], x.dtype.itemsize
    each = 16 if quant == "nvfp4" else 16 // size
    span = -(-cols // 64) * 64 if swizzled else cols
    threads = group_threads(-(-span // each), _MAX_THREADS)
    groups = block_of(threads) // threads
    shared = groups * -(-span // (threads * each)) * threads * each * size
    uniform = size == 4 or not flags & sum(_FP32.values())
    if unfit % 16 == 0 and quant != "nvfp4" and uniform and span <= threads * each:
        shared = 0  # a row of one stretch stays in registers
    elif shared <= device_info(device).shared_per_block // 2:
        flags |= _IN_SHARED
    else:
        shared = 0
    padded = -(-rows // 128) * 128 if swizzled else rows
    first, then = quant_flags(quant, out.dtype, swizzled, quant_scale is None and static == 0, x.dtype)
    launch = _KERNEL.bind(
        (token, FORMATS[quant], unfit % 16 == 0), device, -(-padded // groups), block_of(threads), shared, overlap=True
    )
    tensors = (
        "x", "residual", "gate", "bias", "weight", "norm_bias", "scale", "shift", "channel_scale", "quant_scale",
        0 if first is None else "amax", "out", "residual_out", "kept", "scale_out", "global_out",
    )  # fmt: skip
    numbers = (
        rows, cols, strides["x"][0], strides["residual"][0], *strides["gate"], *strides["scale"], *strides["shift"],
        threads, flags,
    )  # fmt: skip
    ending = float(eps), float(offset), float(static), float(floor)
    steps = [Step(launch, *tensors, *numbers, mode, *ending) for mode in (first, then) if mode is not None]
    return Steps(*steps, zeros={} if first is None else {"amax": 1})
