"""Scales of block formats as block-scaled tensor cores read them, as an operator."""

from __future__ import annotations

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.block_formats import swizzle, swizzled_bytes
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_THREADS = 256
KERNEL = Kernel(
    "quant/swizzle.cu", "swizzle_scales", template="THREADS", variants=[(_THREADS,)], max_registers=40,
    args="scales:ptr swizzled:ptr rows:i64 blocks:i64 row_stride:i64 across:i64 words:i64",
)  # fmt: skip


def _check(scales: Meta) -> None:
    if len(scales.shape) != 2 or scales.dtype.itemsize != 1:
        raise ArgumentError(f"scales is {scales.dtype} {tuple(scales.shape)}; expected one byte each, [rows, blocks]")


def _plan(scales: Meta, device: int) -> Steps:
    rows, blocks = scales.shape
    words = swizzled_bytes(rows, blocks) // 4
    launch = KERNEL.bind((_THREADS,), device, -(-words // _THREADS), _THREADS)
    return Steps(Step(launch, "scales", "swizzled", rows, blocks, scales.stride[0], -(-blocks // 4), words))


SWIZZLE = Operator(
    "nvfp4_swizzle", (Rows("scales", None),), results="swizzled", plan=_plan, reference=swizzle, check=_check,
    outputs=lambda scales: (Memory((swizzled_bytes(*scales.shape),), scales.dtype),),
)  # fmt: skip
