"""The operators of rms_norm."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from rtkernels.ops.norm import reference
from rtkernels.ops.norm.checks import check_inputs, check_over
from rtkernels.ops.norm.rms_norm_plan import check_bwd, plan_bwd, plan_fwd
from rtkernels.runtime.operator.declared import Dense, InPlace, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.sharding import shard_rows


def _prepare_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool
) -> tuple[Any, ...]:
    check_over(h, dy, weight, dsum)
    return dy, h, weight, dsum, eps, offset, weight_grad


def _plan_over(
    dy: Meta, h: Meta, weight: Meta | None, dsum: Meta | None, eps: float, offset: float, weight_grad: bool, device: int
) -> Steps:
    steps = plan_bwd(dy, h, weight, dsum, eps, offset, weight_grad, device, dh="h")
    if "rstd" in steps.scratch:  # a second kernel reads h
        return Steps(instead=partial(reference.rms_bwd_over, backward=BACKWARD.launch))
    return steps


_X, _RESIDUAL, _WEIGHT = Rows("x", None), Rows("residual", None), Dense("weight", None, optional=True)
_DY, _DSUM = Rows("dy", None), Rows("dsum", None, optional=True)
FORWARD = Operator(
    "rms_norm_fwd", (_X, _WEIGHT), options="float eps, float offset", results="y",
    outputs=lambda x: (Memory.like(x),), plan=plan_fwd, reference=reference.rms_fwd, check=check_inputs,
)  # fmt: skip
ADD_FORWARD = Operator(
    "add_rms_norm_fwd", (_X, _RESIDUAL, _WEIGHT), options="float eps, float offset", results="y sum",
    outputs=lambda x: (Memory.like(x), Memory.like(x)), plan=plan_fwd, reference=reference.add_rms_fwd,
    check=check_inputs,
)  # fmt: skip
BACKWARD = Operator(
    "rms_norm_bwd", (_DY, Rows("h", None), _WEIGHT, _DSUM), options="float eps, float offset, bool weight_grad",
    results="dh dweight", plan=plan_bwd, reference=reference.rms_bwd, check=check_bwd,
    outputs=lambda h, weight, weight_grad: (Memory.like(h), Memory.like(weight) if weight_grad else None),
)  # fmt: skip
# Writes the gradient over h; the result is that of the weight, or empty.
BACKWARD_OVER = Operator(
    "rms_norm_bwd_over", (_DY, InPlace("h", None), _WEIGHT, _DSUM),
    options="float eps, float offset, bool weight_grad", results="dweight",
    outputs=lambda weight, weight_grad: (Memory.like(weight) if weight_grad else None,), plan=_plan_over,
    reference=reference.rms_bwd_over, check=check_bwd, prepare=_prepare_over,
)  # fmt: skip

shard_rows(FORWARD, ("x",))
shard_rows(ADD_FORWARD, ("x", "residual"))
shard_rows(BACKWARD, ("dy", "h", "dsum"), sums=1)
