"""int8 codes and scales of a tensor: the quantised output of ``combine``, without an activation."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.act.combine import COMBINE
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import FLOAT_DTYPES
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.operator.arguments import Among, Matching
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.registry import Op

GRANULARITIES = ("row", "tensor")
FLOOR = 1e-30  # of scales, as for fp8


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
    (x,) = detached(x)
    q = new_tensor(tuple(x.shape), torch.int8, x)
    shape = tuple(x.shape[:-1]) if granularity == "row" else ()
    if x.numel() == 0:
        return q, torch.full(shape, FLOOR, dtype=torch.float32, device=x.device)
    scale = new_tensor(shape, torch.float32, x)
    COMBINE.call(
        x, *(None,) * 8, q, None, scale, None, "none", False, False, "plain", "", granularity, False, 0.0, FLOOR, 1.0
    )
    return q, scale


OP = Op("quantize_int8", public=("quantize_int8",), kernels=(), torch_ops=(), uses=("combine",))
