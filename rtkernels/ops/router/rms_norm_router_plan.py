"""The kernel that normalises, quantises and multiplies by a router's weight at once, and where it is the faster way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm import norm_fp8_shapes as shapes
from rtkernels.ops.router.router_gemm_kernels import EXACT
from rtkernels.ops.shared.fp8_layout import groups_of
from rtkernels.runtime.checks import token
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps, matrix_boxes

_INPUTS = (torch.bfloat16, torch.float16)
_THREADS = 640
_BLOCK_ROWS = 64
_BOX = 64
_SLOTS = 6  # of x in shared memory, 16 KB each
_STAGES = 4  # of the router's weight, 32 KB each
_SHARED = _SLOTS * 16384 + _STAGES * 32768 + 1024 + 8 * (4 * _SLOTS + 2 * _STAGES) + 4 * 4 * _BLOCK_ROWS

# Where it is faster than two kernels, by measurements (docs/decisions/router.md). It takes multiples of 4 experts and 8
# columns, but with a slab that is not full it gains nothing. Sums stay in the tensor cores, so their error grows with
# the columns: 2.1e-6 at 2048, 4.5e-6 at 4096.
_EXPERTS = range(64, 257, 4)
_COLUMNS = range(1024, 3073, 128)
_BUSY = 0.7  # share of SMs with work, over all waves of blocks

KERNEL = Kernel(
    "router/rms_norm_router.cu", "norm_router", template="T", max_registers=96, needs=("tma", "wgmma"),
    args="x:tmap router:tmap logits:tmap weight:ptr y:ptr q:ptr scale:ptr rstd:ptr rows:i64 cols:i64 experts:i64 "
    "weight_fp32:i64 scale_row:i64 scale_group:i64 pow2:i64 eps:f64 offset:f64",
    variants=[("bf16",)],
)  # fmt: skip


def check(x: Meta, weight: Meta | None, router_weight: Meta, scale_layout: str) -> None:
    """Raise an ArgumentError unless these go together."""
    token("x", x.dtype, _INPUTS)
    shapes.check(x, weight, None, None, None, None, "row", scale_layout, True, False)
    token("router_weight", router_weight.dtype)
    shape, cols = tuple(router_weight.shape), x.shape[-1]
    if len(shape) != 2 or shape[1] != cols:
        raise ArgumentError(f"router_weight has shape {shape}; expected [experts, {cols}], the columns of x")


def outputs(x, router_weight, scale_layout):
    memory = shapes.outputs(x, None, None, "row", scale_layout, True, False)
    logits = Memory((*x.shape[:-1], router_weight.shape[0]), torch.float32)
    return logits, memory["y"], memory["q"], memory["scale"], memory["computed_rstd"]


def _serves(x: Meta, weight: Meta | None, router: Meta, precision: int, device: int) -> bool:
    if level() or x.dtype != torch.bfloat16 or router.dtype != x.dtype or precision == EXACT:
        return False
    rows, cols, pitch = x.rows, x.shape[-1], x.row_stride
    if cols not in _COLUMNS or router.shape[0] not in _EXPERTS or pitch < cols or rows >= 1 << 31:
        return False
    if vector_bytes(misaligned(x, weight, router), 2 * cols, 2 * pitch) != 16:
        return False
    info, blocks = device_info(device), -(-rows // _BLOCK_ROWS)
    rounds = -(-blocks // info.sm_count)
    return KERNEL.supports(info.target) and blocks > 0 and blocks >= _BUSY * rounds * info.sm_count


def plan(
    in_two: Callable[..., Any], x: Meta, weight: Meta | None, router_weight: Meta, eps: float, offset: float,
    precision: int, pow2_scale: bool, scale_layout: str, device: int,
) -> Steps:  # fmt: skip
    """Return the launch, or that `in_two` normalises and then multiplies, where that is faster."""
    if not _serves(x, weight, router_weight, precision, device):
        return Steps(instead=in_two)
    rows, cols, experts, pitch = x.rows, x.shape[-1], router_weight.shape[0], x.row_stride
    maps = (
        matrix_boxes("x", "bf16", rows, cols, pitch, _BLOCK_ROWS, _BOX),
        matrix_boxes("router_weight", "bf16", experts, cols, cols, experts, _BOX),
        matrix_boxes("logits", "fp32", rows, experts, experts, _BLOCK_ROWS, 32),
    )
    strides = (1, rows) if scale_layout == "column" else (groups_of(cols), 1)
    weight_fp32 = weight is not None and weight.dtype == torch.float32
    launch = KERNEL.bind(("bf16",), device, -(-rows // _BLOCK_ROWS), _THREADS, _SHARED)
    numbers = rows, cols, experts, weight_fp32, *strides, int(pow2_scale), eps, offset
    return Steps(Step(launch, *maps, "weight", "y", "q", "scale", "rstd", *numbers))
