"""int8 codes and scales of a tensor, by the kernels of ``quantize_fp8``; without 16-byte accesses by ``combine``."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.act.combine import COMBINE
from rtkernels.ops.quant.quantize_fp8_plan import plan_int8, scale_shape
from rtkernels.ops.shared.row_quant import quantize_reference
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import FLOAT_DTYPES
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.operator.arguments import Among, Matching
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

GRANULARITIES = ("row", "tensor")
FLOOR = 1e-30  # of scales, as for fp8


def _outputs(x, granularity):
    return Memory(x.shape, torch.int8), Memory(scale_shape(x.shape, granularity, "row"), torch.float32)


def _plan(x: Meta, granularity: str) -> Steps:
    return plan_int8(x, granularity) or Steps(instead=_combined)


def _combined(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    q = new_tensor(tuple(x.shape), torch.int8, x)
    scale = new_tensor(scale_shape(x.shape, granularity, "row"), torch.float32, x)
    COMBINE.launch(
        x, *(None,) * 8, q, None, scale, None, "none", False, False, "plain", "", granularity, False, 0.0, FLOOR, 1.0
    )
    return q, scale


def _reference(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(scale_shape(x.shape, granularity, "row"), dtype=torch.float32, device=x.device)
    quantize_reference(x.float(), granularity, q, None, scale, None, False, 0.0, FLOOR)
    return q, scale


QUANTIZE = Operator(
    "quantize_int8", (Rows("x", None),), options="str granularity", results="q scale", outputs=_outputs, plan=_plan,
    reference=_reference,
)  # fmt: skip


_OPTIONS = {
    "x": Matching(FLOAT_DTYPES, "x.dim()"),
    "granularity": Among(GRANULARITIES, f"one of {', '.join(map(repr, GRANULARITIES))}"),
}


@public(options=_OPTIONS)
def quantize_int8(
    x: Tensor, *, granularity: str = "row", out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor to int8 codes and scales, symmetrically.

    For each set of values that share a scale: ``scale = max(amax / 127, 1e-30)`` and ``q = int8(x * (1 / scale))``;
    ``x ≈ q * scale``. Computed in fp32, rounded to nearest even and clamped to ±127. ``amax`` is the largest *finite*
    magnitude: NaN becomes the code 0 and ±infinity ±127, and neither affects the scale. Sets of zeros, and empty ones,
    have scale 1e-30 and codes 0. Codes and scales of rows are operands of :func:`scaled_mm`.

    Not differentiable: the results never require grad.

    Args:
        x: At least one dimension, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and
            evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        granularity: Which values share a scale: "row" or "tensor".
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(q, scale)``, both contiguous: int8 codes of x's shape, and float32 scales of x's shape without the last
        dimension, or ``[]`` for granularity "tensor".
    """
    if level() and granularity == "tensor":
        refuse("quantize_int8 with granularity 'tensor'", "a scale covers several rows")
    (x,) = detached(x)
    return QUANTIZE.call(x, granularity)


OP = Op(
    "quantize_int8", public=("quantize_int8",), kernels=(), torch_ops=(QUANTIZE,), uses=("combine", "quantize_fp8")
)
