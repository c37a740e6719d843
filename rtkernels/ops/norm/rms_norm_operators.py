"""The operators of rms_norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rtkernels.ops.norm import reference
from rtkernels.ops.norm.checks import check_out, check_over
from rtkernels.ops.norm.reference import over
from rtkernels.ops.norm.rms_norm_plan import check, check_bwd, check_fwd, plan_add, plan_bwd, plan_fwd, plan_out
from rtkernels.runtime.operator.declared import Dense, InPlace, InPlaceDense, InPlaceOperator, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.sharding import shard_rows


def _like(x):
    return Memory(x.shape, x.dtype)


def _bwd_outputs(dy, h, weight, dsum, eps, offset, weight_grad):
    return _like(h), _like(weight) if weight_grad else None


def _prepare_out(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, out: Tensor):
    check_out(out, x, residual, weight)
    return x, residual, weight, eps, offset, out


def _prepare_over(dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, *options: Any) -> tuple[Any, ...]:
    check_over(h, dy, weight, dsum)
    return dy, h, weight, dsum, *options


def _plan_over(*values: Any) -> Steps:
    steps = plan_bwd(*values, dh="h")
    return Steps(instead=over(BACKWARD.launch)) if "rstd" in steps.scratch else steps  # a second kernel reads h


_X, _RESIDUAL, _WEIGHT = Rows("x", None), Rows("residual", None), Dense("weight", None, optional=True)
_DY, _DSUM = Rows("dy", None), Rows("dsum", None, optional=True)
FORWARD = Operator(
    "rms_norm_fwd", (_X, _WEIGHT), options="float eps, float offset", results="y",
    outputs=lambda x, *_: (_like(x),), plan=plan_fwd, reference=reference.rms_fwd, check=check_fwd,
)  # fmt: skip
ADD_FORWARD = Operator(
    "add_rms_norm_fwd", (_X, _RESIDUAL, _WEIGHT), options="float eps, float offset", results="y sum",
    outputs=lambda x, *_: (_like(x), _like(x)), plan=plan_add, reference=reference.rms_add_fwd, check=check,
)  # fmt: skip
# Writes y into out; the result is the sum, or empty without a residual.
OUT_FORWARD = InPlaceOperator(
    "rms_norm_out",
    (_X, Rows("residual", None, optional=True), _WEIGHT, "float eps", "float offset", InPlaceDense("out", None)),
    results="sum", outputs=lambda x, residual, *_: (None if residual is None else _like(x),), plan=plan_out,
    reference=reference.rms_out, check=check, prepare=_prepare_out,
)  # fmt: skip
BACKWARD = Operator(
    "rms_norm_bwd", (_DY, Rows("h", None), _WEIGHT, _DSUM), options="float eps, float offset, bool weight_grad",
    results="dh dweight", outputs=_bwd_outputs, plan=plan_bwd, reference=reference.rms_bwd, check=check_bwd,
)  # fmt: skip
# Writes the gradient over h; the result is that of the weight, or empty.
BACKWARD_OVER = InPlaceOperator(
    "rms_norm_bwd_over", (_DY, InPlace("h", None), _WEIGHT, _DSUM),
    options="float eps, float offset, bool weight_grad", results="dweight",
    outputs=lambda *values: _bwd_outputs(*values)[1:], plan=_plan_over, reference=over(reference.rms_bwd),
    check=check_bwd, prepare=_prepare_over,
)  # fmt: skip

shard_rows(FORWARD, ("x",))
shard_rows(ADD_FORWARD, ("x", "residual"))
shard_rows(BACKWARD, ("dy", "h", "dsum"), sums=1)
