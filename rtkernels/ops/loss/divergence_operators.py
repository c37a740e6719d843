"""The operators of the divergences."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.loss.divergence_plan import check, check_bwd, gradient_step, resolve, terms_step, total_step
from rtkernels.ops.loss.divergence_reference import reference_bwd, reference_each, reference_fwd
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Steps


def _plan_total(
    x: Meta, target: Meta, labels: Meta | None, ignore: int, mode: int, beta: float, factor: float, over: int,
    device: int, gradient: bool = False,
) -> Steps:  # fmt: skip
    """Return what gives the reduced loss and, in the same pass, the gradient in x; rows are counted before that."""
    rows, steps, scratch = x.rows, [], {"row_loss": Memory((x.rows,), torch.float32)}
    factor, divide = resolve(x.shape, over, factor)
    results, scale = ("row_loss", 0, 0, 0), 1.0
    if gradient:
        counted, scale = divide and labels is not None, factor / rows if divide else factor
        results = "row_loss", 0, "dx", "before" if counted else 0
        if counted:
            scratch["before"] = Memory((2,), torch.float32)
            steps.append(total_step(x, labels, ignore, True, factor, device, 0, "before"))
    terms = terms_step(x, target, labels, ignore, mode, beta, device, results, scale=scale)
    if terms is None:
        return Steps(instead=_both_in_fp32 if gradient else _fwd_in_fp32)
    total = total_step(x, labels, ignore, divide, factor, device, "row_loss", "total")
    return Steps(*steps, terms, total, scratch=scratch)


def _fwd_in_fp32(x: Tensor, target: Tensor, *rest: Any) -> Tensor:
    return FORWARD.launch(x.float(), target.float(), *rest)


def _both_in_fp32(x: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total, dx = BOTH.launch(x.float(), target.float(), *rest)
    return total, dx.to(x.dtype)


def _plan_each(x: Meta, target: Meta, labels: Meta | None, ignore: int, mode: int, beta: float, device: int) -> Steps:
    terms = terms_step(x, target, labels, ignore, mode, beta, device, (0, "each", 0, 0))
    if terms is None:
        return Steps(instead=lambda x, y, *rest: EACH.launch(x.float(), y.float(), *rest).to(x.dtype))
    return Steps(terms)


def _plan_bwd(
    grad: Meta, x: Meta, target: Meta, labels: Meta | None, total: Meta | None, ignore: int, mode: int, beta: float,
    in_target: bool, device: int,
) -> Steps:  # fmt: skip
    step = gradient_step(grad, x, target, labels, total, ignore, mode, beta, in_target, device)
    if step is None:
        return Steps(instead=lambda g, x, y, *rest: BACKWARD.launch(g.float(), x.float(), y.float(), *rest).to(x.dtype))
    return Steps(step)


def _reference_both(x, target, labels, ignore, mode, beta, factor, over):
    total = reference_fwd(x, target, labels, ignore, mode, beta, factor, over)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return total, reference_bwd(one, x, target, labels, total, ignore, mode, beta, False)


_INPUTS = Rows("x", None), Rows("target", None), Dense("labels", None, optional=True)
_OPTIONS, _TOTAL = "int ignore, int mode, float beta", Memory((2,), torch.float32)
FORWARD = Operator(
    "divergence_fwd", _INPUTS, options=f"{_OPTIONS}, float factor, int over", results="total",
    outputs=lambda: (_TOTAL,), plan=_plan_total, reference=reference_fwd, check=check,
)  # fmt: skip
BOTH = Operator(
    "divergence_both", _INPUTS, options=f"{_OPTIONS}, float factor, int over", results="total dx",
    outputs=lambda x: (_TOTAL, Memory.like(x)), plan=partial(_plan_total, gradient=True), reference=_reference_both,
    check=check,
)  # fmt: skip
EACH = Operator(
    "divergence_each_fwd", _INPUTS, options=_OPTIONS, results="each", outputs=lambda x: (Memory.like(x),),
    plan=_plan_each, reference=reference_each, check=check,
)  # fmt: skip
BACKWARD = Operator(
    "divergence_bwd", (Rows("grad", None), *_INPUTS, Dense("total", None, optional=True)),
    options=f"{_OPTIONS}, bool in_target", results="out", outputs=lambda x: (Memory.like(x),),
    plan=_plan_bwd, reference=reference_bwd, check=check_bwd,
)  # fmt: skip
