"""Kernels of ``nvfp4`` and the choice of a launch."""

from __future__ import annotations

import torch

from rtkernels.ops.shared.block_formats import ELEMENT_RULES, SCALE_RULES
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, divisor, row_count, row_stride
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Step, Steps

FORMATS = {"nvfp4": 0, "mxfp4": 1, "mxfp8": 2}
_TYPES = ("bf16", "fp16", "fp32")
_THREADS = 256
_THREADS_BACK = 256  # of dequantize_blocks
_STRETCHES = 2  # of a thread of it
_RESIDENT_DENSE = 5  # blocks of quantize_dense
_RESIDENT = 4  # resident blocks per SM; 3 for fp32 and for all rules: the launch bounds in quant/nvfp4.cu
# Flags of quant/nvfp4.cu.
_ALIGNED16, _SWIZZLED, _CHANNEL_FP32, _E5M2, _ROUND_UP, _WHOLE_CODES, _DENSE_ROWS = (1 << bit for bit in range(7))

_SIZES = "rows:i64 cols:i64 blocks:i64"
_AMAX = Kernel(
    "quant/nvfp4.cu", "tensor_amax", template="T", max_registers=96,
    args=f"x:ptr channel_scale:ptr amax:ptr {_SIZES} x_stride:i64 divisor:i64 flags:i64",
    variants=[(t,) for t in _TYPES], tier="serve",
)  # fmt: skip
_QUANTIZE = Kernel(
    "quant/nvfp4.cu", "quantize_blocks", template="T FORMAT", max_registers=96,
    args="x:ptr channel_scale:ptr global_scale:ptr amax:ptr out:ptr scales:ptr global_out:ptr rows:i64 cols:i64 "
    "blocks:i64 threads:i64 x_stride:i64 divisor:i64 flags:i64 scale_rule:i64 elem_rule:i64 number:f64",
    variants=[(t, f) for t in _TYPES for f in FORMATS.values()], tier="serve",
)  # fmt: skip
_DENSE = Kernel(
    "quant/nvfp4.cu", "quantize_dense", template="T", max_registers=64,
    args="x:ptr global_scale:ptr amax:ptr out:ptr scales:ptr global_out:ptr count:i64 blocks_of_row:i64 "
    "divisor:i64 flags:i64 scale_rule:i64 number:f64",
    variants=[("bf16",), ("fp16",)], tier="serve",
)  # fmt: skip
_DEQUANTIZE = Kernel(
    "quant/nvfp4.cu", "dequantize_blocks", template="T", max_registers=80,
    args=f"codes:ptr scales:ptr global_scale:ptr out:ptr {_SIZES} codes_stride:i64 divisor:i64 flags:i64 format:i64",
    variants=[(t,) for t in _TYPES], tier="serve",
)  # fmt: skip
KERNELS = (_AMAX, _QUANTIZE, _DENSE, _DEQUANTIZE)


def scale_block(format: str) -> int:
    """Return how many values share a scale."""
    return 16 if format == "nvfp4" else 32


def _divisor(threads: int, blocks: int) -> int:
    return divisor(blocks) if threads < 2**31 - 1024 else 0


def plan_quantize(
    x: Meta, channel_scale: Meta | None, out: Meta, global_out: Meta | None, format: str, swizzled: bool,
    scale_rule: str, elem_rule: str, static: float, device: int,
) -> Steps:  # fmt: skip
    rows, cols, stride = row_count(x.shape), x.shape[-1], row_stride(x.shape, x.stride)
    size, factor = x.dtype.itemsize, channel_scale
    aligned = not (x.misaligned | cols * size % 16 | stride * size % 16)
    flags = _ALIGNED16 * (aligned and (factor is None or not factor.misaligned)) | _SWIZZLED * swizzled
    flags |= _CHANNEL_FP32 * (factor is not None and factor.dtype == torch.float32) | _E5M2 * (
        out.dtype == torch.float8_e5m2
    )
    flags |= _ROUND_UP * (scale_rule == "nv")
    each = scale_block(format) // 16  # threads that share a scale: neighbours, so rows have a multiple of them
    blocks = -(-cols // (16 * each)) * each
    token, steps, zeros, amax = DTYPE_TOKEN[x.dtype], [], {}, 0
    if global_out is not None and static == 0:
        threads = rows * blocks
        grid = min(-(-threads // _THREADS), 8 * device_info(device).sm_count)
        launch = _AMAX.bind((token,), device, grid, _THREADS)
        sizes = rows, cols, blocks, stride, _divisor(threads, blocks), flags
        steps.append(Step(launch, "x", "channel_scale", "amax", *sizes))
        zeros, amax = {"amax": 1}, "amax"
    padded = -(-blocks // (4 * each)) * 4 * each if swizzled else blocks
    threads = (-(-rows // 128) * 128 if swizzled else rows) * padded
    scale_rules = SCALE_RULES.index(scale_rule) if scale_rule in SCALE_RULES else 0
    whole = threads == rows * cols // 16 and threads < 2**30 and not (x.misaligned | cols % 16)
    if (
        format == "nvfp4" and whole and stride == cols and size == 2 and factor is None
        and elem_rule == "rne" and scale_rule in ("rne", "ceil")
    ):  # fmt: skip
        grid = min(-(-threads // _THREADS), _RESIDENT_DENSE * device_info(device).sm_count)
        launch = _DENSE.bind((token,), device, grid, _THREADS)
        sizes = threads, padded, divisor(padded), flags, scale_rules, float(static)
        steps.append(Step(launch, "x", "global_scale", amax, "out", "scale_out", "global_out", *sizes))
        return Steps(*steps, zeros=zeros)
    resident = _RESIDENT if format != "nvfp4" and size == 2 else 3
    grid = min(-(-threads // _THREADS), resident * device_info(device).sm_count)
    launch = _QUANTIZE.bind((token, FORMATS[format]), device, grid, _THREADS)
    steps.append(
        Step(
            launch, "x", "channel_scale", "global_scale", amax, "out", "scale_out", "global_out", rows, cols, padded,
            threads, stride, _divisor(threads, padded), flags, scale_rules, ELEMENT_RULES.index(elem_rule),
            float(static),
        )
    )  # fmt: skip
    return Steps(*steps, zeros=zeros)


def plan_dequantize(codes: Meta, out: Meta, format: str, swizzled: bool, device: int) -> Steps:
    rows, cols, stride = row_count(out.shape), out.shape[-1], row_stride(codes.shape, codes.stride)
    flags = _ALIGNED16 * (not (out.misaligned | cols * out.dtype.itemsize % 16)) | _SWIZZLED * swizzled
    flags |= _E5M2 * (codes.dtype == torch.float8_e5m2)
    flags |= _WHOLE_CODES * ((codes.misaligned | stride) % (8 if format == "mxfp8" else 4) == 0)
    coded = cols if format == "mxfp8" else cols // 2
    whole = flags & _ALIGNED16 and flags & _WHOLE_CODES and not swizzled and cols % scale_block(format) == 0
    flags |= _DENSE_ROWS * bool(whole and stride == coded)
    blocks = -(-cols // 8)
    grid = -(-rows * blocks // (_STRETCHES * _THREADS_BACK))
    launch = _DEQUANTIZE.bind((DTYPE_TOKEN[out.dtype],), device, grid, _THREADS_BACK)
    sizes = rows, cols, blocks, stride, _divisor(rows * blocks, blocks), flags, FORMATS[format]
    return Steps(Step(launch, "codes", "scales", "global_scale", "out", *sizes))
