"""The operators of layer_norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rtkernels.ops.norm import reference
from rtkernels.ops.norm.checks import check_out, check_over
from rtkernels.ops.norm.layer_norm_plan import (
    check,
    check_add,
    check_bwd,
    parameter_sums,
    plan_add,
    plan_bwd,
    plan_fwd,
    plan_out,
)
from rtkernels.ops.norm.reference import over
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, InPlaceDense, InPlaceOperator, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.sharding import shard_rows


def _like(x):
    return Memory(x.shape, x.dtype)


def _bwd_outputs(dy, h, weight, bias, dsum, eps, offset, parameter_grad):
    sums, dtype = parameter_sums(weight, bias, parameter_grad)
    return _like(h), Memory((sums, h.shape[-1]), dtype) if sums else None


def _prepare_out(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *rest: Any):
    check_out(rest[-1], x, residual, weight, bias)
    return x, residual, weight, bias, *rest


def _prepare_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, dsum: Tensor | None, *options: Any
) -> tuple[Any, ...]:
    check_over(h, dy, weight, dsum)
    return dy, h, weight, bias, dsum, *options


def _plan_over(*values: Any) -> Steps:
    steps = plan_bwd(*values, dh="h")
    return Steps(instead=over(BACKWARD.launch)) if "stats" in steps.scratch else steps  # a second kernel reads h


_X, _RESIDUAL, _DY, _DSUM = Rows("x", None), Rows("residual", None), Rows("dy", None), Rows("dsum", None, optional=True)
_WEIGHT, _BIAS = Dense("weight", None, optional=True), Dense("bias", None, optional=True)
_OPTIONS = "float eps, float offset"
FORWARD = Operator(
    "layer_norm_fwd", (_X, _WEIGHT, _BIAS), options=_OPTIONS, results="y", outputs=lambda x, *_: (_like(x),),
    plan=plan_fwd, reference=reference.layer_fwd, check=check,
)  # fmt: skip
ADD_FORWARD = Operator(
    "add_layer_norm_fwd", (_X, _RESIDUAL, _WEIGHT, _BIAS), options=_OPTIONS, results="y sum",
    outputs=lambda x, *_: (_like(x), _like(x)), plan=plan_add, reference=reference.layer_add_fwd, check=check_add,
)  # fmt: skip
# Writes y into out; the result is the sum, or empty without a residual.
OUT_FORWARD = InPlaceOperator(
    "layer_norm_out",
    (_X, Rows("residual", None, optional=True), _WEIGHT, _BIAS, *_OPTIONS.split(", "), InPlaceDense("out", None)),
    results="sum", outputs=lambda x, residual, *_: (None if residual is None else _like(x),), plan=plan_out,
    reference=reference.layer_out, check=check_add, prepare=_prepare_out,
)  # fmt: skip
# The second result is [1, n] (dweight), [2, n] (dweight and dbias) or empty; bias says only that dbias is wanted.
_BWD_BIAS = Argument("bias", None, optional=True)
BACKWARD = Operator(
    "layer_norm_bwd", (_DY, Rows("h", None), _WEIGHT, _BWD_BIAS, _DSUM), options=f"{_OPTIONS}, bool parameter_grad",
    results="dh gradients", outputs=_bwd_outputs, plan=plan_bwd, reference=reference.layer_bwd, check=check_bwd,
)  # fmt: skip
# Writes the gradient over h; the result is the second one of layer_norm_bwd.
BACKWARD_OVER = InPlaceOperator(
    "layer_norm_bwd_over", (_DY, InPlace("h", None), _WEIGHT, _BWD_BIAS, _DSUM),
    options=f"{_OPTIONS}, bool parameter_grad", results="gradients",
    outputs=lambda *values: _bwd_outputs(*values)[1:], plan=_plan_over, reference=over(reference.layer_bwd),
    check=check_bwd, prepare=_prepare_over,
)  # fmt: skip

shard_rows(FORWARD, ("x",))
shard_rows(ADD_FORWARD, ("x", "residual"))
shard_rows(BACKWARD, ("dy", "h", "dsum"), sums=1)
