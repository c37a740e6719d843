"""weight_norm over rows, and its gradients from the norms that aten keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.reduce.row_norm import launch_by_rows
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_FWD = Kernel(
    "reduce/weight_norm.cu", "weight_norm_fwd", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="v:ptr g:ptr w:ptr norms:ptr rows:i64 cols:i64 threads_per_row:i64 aligned:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/weight_norm.cu", "weight_norm_bwd", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="dw:ptr v:ptr g:ptr norms:ptr dv:ptr dg:ptr rows:i64 cols:i64 threads_per_row:i64 aligned:i64",
)  # fmt: skip


def _plan_fwd(v: Meta, g: Meta, device: int) -> Steps:
    launch, *numbers = launch_by_rows(_FWD, v, *v.shape, misaligned(v), device)
    return Steps(Step(launch, "v", "g", "w", "norms", *v.shape, *numbers))


def _plan_bwd(dw: Meta, v: Meta, g: Meta, norms: Meta, device: int) -> Steps:
    launch, *numbers = launch_by_rows(_BWD, v, *v.shape, misaligned(dw, v), device)
    return Steps(Step(launch, "dw", "v", "g", "norms", "dv", "dg", *v.shape, *numbers))


_FORWARD = Primitive(
    "weight_norm_fwd", (Dense("v", None), Dense("g", None)), results="w norms", plan=_plan_fwd,
    outputs=lambda v, g: (Memory(v.shape, v.dtype), Memory(v.shape[:1], torch.float32)),
)  # fmt: skip
_BACKWARD = Primitive(
    "weight_norm_bwd", (Dense("dw", None), Dense("v", None), Dense("g", None), Dense("norms", None)), results="dv dg",
    outputs=lambda dw, v, g, norms: (Memory(v.shape, v.dtype), Memory(v.shape[:1], v.dtype)), plan=_plan_bwd,
)  # fmt: skip


def weight_norm(v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of the length that g says, and the lengths they had.

    Args:
        v: (rows, cols), bfloat16, float16 or float32; not empty.
        g: (rows,), of v's dtype.

    Returns:
        ``v * g / norms``, of v's shape and dtype; norms, (rows,), float32.
    """
    return _FORWARD(v, g)


def weight_norm_grads(dw: Tensor, v: Tensor, g: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and g.

    Args:
        dw: Like v.
        v: As for ``weight_norm``.
        g: As for ``weight_norm``.
        norms: What it returned.

    Returns:
        Of v's and g's shapes.
    """
    return _BACKWARD(dw, v, g, norms)


OP = Op("weight_norm", public=(), kernels=(_FWD, _BWD), torch_ops=())
__all__ = ["OP", "weight_norm", "weight_norm_grads"]
