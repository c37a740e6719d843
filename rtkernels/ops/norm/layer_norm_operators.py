"""The operators of layer_norm."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from rtkernels.ops.norm import reference
from rtkernels.ops.norm.checks import check_inputs, check_over
from rtkernels.ops.norm.layer_norm_plan import check_bwd, parameter_sums, plan_bwd, plan_fwd
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.sharding import shard_rows


def _gradients(h, weight, bias, parameter_grad):
    sums, dtype = parameter_sums(weight, bias, parameter_grad)
    return (Memory((sums, h.shape[-1]), dtype) if sums else None,)


def _prepare_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, dsum: Tensor | None, eps: float, offset: float,
    parameter_grad: bool,
) -> tuple[Any, ...]:  # fmt: skip
    check_over(h, dy, weight, bias, dsum)
    return dy, h, weight, bias, dsum, eps, offset, parameter_grad


def _plan_over(
    dy: Meta, h: Meta, weight: Meta | None, bias: Meta | None, dsum: Meta | None, eps: float, offset: float,
    parameter_grad: bool, device: int,
) -> Steps:  # fmt: skip
    steps = plan_bwd(dy, h, weight, bias, dsum, eps, offset, parameter_grad, device, dh="h")
    if "stats" in steps.scratch:  # a second kernel reads h
        return Steps(instead=partial(reference.layer_bwd_over, backward=BACKWARD.launch))
    return steps


_X, _RESIDUAL, _DY, _DSUM = Rows("x", None), Rows("residual", None), Rows("dy", None), Rows("dsum", None, optional=True)
_WEIGHT, _BIAS = Dense("weight", None, optional=True), Dense("bias", None, optional=True)
_OPTIONS = "float eps, float offset"
FORWARD = Operator(
    "layer_norm_fwd", (_X, _WEIGHT, _BIAS), options=_OPTIONS, results="y", outputs=lambda x: (Memory.like(x),),
    plan=plan_fwd, reference=reference.layer_fwd, check=check_inputs,
)  # fmt: skip
ADD_FORWARD = Operator(
    "add_layer_norm_fwd", (_X, _RESIDUAL, _WEIGHT, _BIAS), options=_OPTIONS, results="y sum",
    outputs=lambda x: (Memory.like(x), Memory.like(x)), plan=plan_fwd, reference=reference.add_layer_fwd,
    check=check_inputs,
)  # fmt: skip
# The second result is [1, n] (dweight), [2, n] (dweight and dbias) or empty; bias says only that dbias is wanted.
_BWD_BIAS = Argument("bias", None, optional=True)
BACKWARD = Operator(
    "layer_norm_bwd", (_DY, Rows("h", None), _WEIGHT, _BWD_BIAS, _DSUM), options=f"{_OPTIONS}, bool parameter_grad",
    results="dh gradients", plan=plan_bwd, reference=reference.layer_bwd, check=check_bwd,
    outputs=lambda h, weight, bias, parameter_grad: (Memory.like(h), *_gradients(h, weight, bias, parameter_grad)),
)  # fmt: skip
# Writes the gradient over h; the result is the second one of layer_norm_bwd.
BACKWARD_OVER = Operator(
    "layer_norm_bwd_over", (_DY, InPlace("h", None), _WEIGHT, _BWD_BIAS, _DSUM),
    options=f"{_OPTIONS}, bool parameter_grad", results="gradients", outputs=_gradients, plan=_plan_over,
    reference=reference.layer_bwd_over, check=check_bwd, prepare=_prepare_over,
)  # fmt: skip

shard_rows(FORWARD, ("x",))
shard_rows(ADD_FORWARD, ("x", "residual"))
shard_rows(BACKWARD, ("dy", "h", "dsum"), sums=1)
