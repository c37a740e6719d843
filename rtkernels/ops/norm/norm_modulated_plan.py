"""The kernel of ``norm_modulated`` and the choice of a launch."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.row_launch import FORMATS, quant_flags, quick_variants, row_variants
from rtkernels.ops.shared.row_quant import BLOCK
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, block_of, divisor, float_halves, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Step, Steps

_MAX_THREADS = 512
_WAVE_THREADS = 512  # of a multiprocessor: above that a thread has two vectors
_KERNEL = Kernel(
    "norm/norm_modulated.cu", "norm_modulated", template="T FORMAT ALIGNED", max_registers=128,
    args="x:ptr residual:ptr gate:ptr bias:ptr weight:ptr norm_bias:ptr scale:ptr shift:ptr channel_scale:ptr "
    "quant_scale:ptr amax:ptr out:ptr residual_out:ptr kept:ptr scale_out:ptr global_out:ptr rows:i64 cols:i64 "
    "x_stride:i64 residual_stride:i64 gate_stride:i64 gate_each:i64 scale_stride:i64 scale_each:i64 shift_stride:i64 "
    "shift_each:i64 threads_per_row:i64 flags:i64 quant:i64 eps:f64 offset:f64 number:f64 floor:f64",
    variants=row_variants(), tier="serve",
)  # fmt: skip
_IN_REGISTERS = Kernel(
    "norm/norm_in_registers.cu", "norm_in_registers", template="T FORMAT", max_registers=128,
    args="x:ptr residual:ptr before:ptr p:ptr q:ptr quant_scale:ptr amax:ptr out:ptr residual_out:ptr kept:ptr "
    "scale_out:ptr global_out:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 before_stride:i64 "
    "before_divisor:i64 p_stride:i64 p_divisor:i64 q_stride:i64 q_divisor:i64 lane_bits:i64 flags:i64 offsets:i64 "
    "quant:i64 eps:f64 number:f64 floor:f64",
    variants=quick_variants(), tier="serve",
)  # fmt: skip
KERNELS = (_KERNEL, _IN_REGISTERS)
# Flags of norm/norm_modulated.cu.
_CENTRED, _IN_SHARED = 2, 4
_FP32 = {
    "gate": 32, "bias": 64, "weight": 128, "norm_bias": 256, "scale": 512, "shift": 1024, "channel_scale": 2048,
}  # fmt: skip
# Of norm/norm_in_registers.cu: operands before and behind the statistics, and whether they are added or multiply.
_HAS_RESIDUAL, _ADDED, _MULTIPLIED = 4, 1, 2
_BEFORE = {"bias": _ADDED, "gate": _MULTIPLIED}
_BEHIND = {
    "weight": _MULTIPLIED, "norm_bias": _ADDED, "scale": _MULTIPLIED, "shift": _ADDED, "channel_scale": _MULTIPLIED,
}  # fmt: skip


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
    info = device_info(device)
    padded = -(-rows // 128) * 128 if swizzled else rows
    first, then = quant_flags(quant, out.dtype, swizzled, quant_scale is None and static == 0, x.dtype)
    results = 0 if first is None else "amax", "out", "residual_out", "kept", "scale_out", "global_out"
    present = [name for name, meta in given.items() if meta is not None]
    before = [name for name in present if name in _BEFORE]
    behind = [name for name in present if name in _BEHIND]
    uniform = quant != "nvfp4" if size == 4 else not flags & sum(_FP32.values())
    many = rows * span > each * _WAVE_THREADS * info.sm_count or span > each * _MAX_THREADS
    vectors = 2 if many and quant != "nvfp4" else 1  # of a thread: two if all multiprocessors have work without
    threads = group_threads(-(-span // (each * vectors)), _MAX_THREADS)
    if quant == "block128":  # what shares a scale is one vector in each of these lanes
        threads = max(threads, BLOCK // each)
    ending = float(static), float(floor)
    if unfit % 16 == 0 and uniform and len(before) <= 1 and len(behind) <= 2 and span <= threads * each * vectors:
        launch = _IN_REGISTERS.bind(
            (token, FORMATS[quant]),
            device,
            -(-padded // (block_of(threads) // threads)),
            block_of(threads),
            overlap=True,
        )
        operands = [*(before or [0]), *behind, *[0] * (2 - len(behind))]
        roles = [{**_BEFORE, **_BEHIND}.get(name, 0) for name in operands]
        flags &= _CENTRED
        flags |= _HAS_RESIDUAL * (residual is not None) | roles[0] << 8 | roles[1] << 10 | roles[2] << 12
        steps_of = [
            value for stride, rows_of in (strides.get(name, (0, 1)) for name in operands)
            for value in (stride, divisor(rows_of))
        ]  # fmt: skip
        offsets = [{"weight": float(offset), "scale": 1.0}.get(name, 0.0) for name in operands[1:]]
        tensors = "x", "residual", *operands, "quant_scale", *results
        strides_of = strides["x"][0], strides["residual"][0], *steps_of
        lane_bits = 31 if threads > 32 else threads.bit_length() - 1
        numbers = rows, cols, *strides_of, lane_bits, flags, float_halves(*offsets)
        steps = [
            Step(launch, *tensors, *numbers, mode, float(eps), *ending) for mode in (first, then) if mode is not None
        ]
        return Steps(*steps, zeros={} if first is None else {"amax": 1})
    threads = group_threads(-(-span // each), _MAX_THREADS)
    groups = block_of(threads) // threads
    shared = groups * -(-span // (threads * each)) * threads * each * size
    if shared <= info.shared_per_block // 2:
        flags |= _IN_SHARED
    else:
        shared = 0
    launch = _KERNEL.bind(
        (token, FORMATS[quant], unfit % 16 == 0), device, -(-padded // groups), block_of(threads), shared, overlap=True
    )
    tensors = *given, "quant_scale", *results
    numbers = (
        rows, cols, strides["x"][0], strides["residual"][0], *strides["gate"], *strides["scale"], *strides["shift"],
        threads, flags,
    )  # fmt: skip
    steps = [
        Step(launch, *tensors, *numbers, mode, float(eps), float(offset), *ending)
        for mode in (first, then)
        if mode is not None
    ]
    return Steps(*steps, zeros={} if first is None else {"amax": 1})
