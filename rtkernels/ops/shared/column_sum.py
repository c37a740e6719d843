"""Sum of the rows of a dense fp32 matrix: the last step of weight gradients. Not public."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.runtime.invariance import refuse_weight_gradient
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, TYPES
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_KERNEL = Kernel(
    "shared/column_sum.cu", "column_sum", template="T", max_registers=40,
    args="partial:ptr out:ptr rows:i64 cols:i64 pairs:i64", variants=TYPES,
)  # fmt: skip


def overlaps_next(cols: int) -> bool:
    """Return whether a sum over so many columns should start, and wait, while the kernel before it still runs.

    With more blocks of the sum that costs more than it saves (decisions/norm.md, sums that overlap).
    """
    return cols <= 2048


def parts_grid(info: DeviceInfo, rows: int, cols: int, vec: int) -> tuple[int, int]:
    """Return the grid of a kernel that sums rows up in parts: blocks of 256 times `vec` columns, and parts."""
    across = -(-cols // (256 * vec))
    return across, min(max(1, 4 * info.sm_count // across), rows, 65535)


def column_sum_step(
    partial: str, out: str, rows: int, cols: int, dtype: torch.dtype, device: int, *, overlaps: bool = True
) -> Step:
    """Return the launch that writes the sum over the rows of `partial` (dense fp32, cols > 0) to `out`, of `dtype`.

    The order of additions depends on the shape only. `partial` must come from the previous kernel of the stream or an
    earlier one. `overlaps`: that kernel lets this one start before it ends, and leaves room for its blocks.
    """
    refuse_weight_gradient("the gradient of a weight or bias")
    info = device_info(device)
    # Two columns in a lane where there would be more blocks than can wait while the kernel before runs.
    pairs = int(overlaps and cols > 32 * info.sm_count and cols % 2 == 0)
    grid = -(-cols // (32 << pairs))
    shared = 1024 << pairs
    if not overlaps:
        # So that those SMs which are free first do not take them all (decisions/norm.md).
        shared = max(shared, min(info.shared_per_block // 2, (200 << 10) // -(-grid // info.sm_count)) & ~15)
    launch = _KERNEL.bind((DTYPE_TOKEN[dtype],), device, grid, 256, shared, overlap=True)
    return Step(launch, partial, out, rows, cols, pairs)


def _plan(partial: Meta, dtype: torch.dtype, device: int) -> Steps:
    return Steps(column_sum_step("partial", "out", *partial.shape, dtype, device))


_SUM = Primitive(
    "column_sum", (Dense("partial", (torch.float32,)),), "dtype", results="out", plan=_plan,
    outputs=lambda partial, dtype: (Memory((partial.shape[1],), dtype),),
)  # fmt: skip


def column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the rows of `partial` (fp32 ``[rows, cols]``, not empty) as ``[cols]`` of `dtype`."""
    return _SUM(partial, dtype)


OP = Op("column_sum", public=(), kernels=(_KERNEL,), torch_ops=())
