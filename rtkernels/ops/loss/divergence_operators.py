"""The operators of the divergences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.loss.divergence_plan import check, check_bwd, gradient_step, resolve, terms_step, total_step
from rtkernels.ops.loss.divergence_reference import reference_bwd, reference_each, reference_fwd
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Step, Steps

# ---- plans ----------------------------------------------------------------------------------------------------------


def _plan_fwd(
    x: Meta, target: Meta, labels: Meta | None, ignore: int, mode: int, beta: float, factor: float, over: int,
    device: int,
) -> Steps:  # fmt: skip
    terms = terms_step(x, target, labels, ignore, mode, beta, device, ("row_loss", 0, 0, 0))
    if terms is None:
        return Steps(instead=lambda x, target, *rest: FORWARD.launch(x.float(), target.float(), *rest))
    factor, divide = resolve(x.shape, over, factor)
    total = total_step(x, labels, ignore, divide, factor, device, "row_loss", "total")
    return Steps(terms, total, scratch={"row_loss": Memory((x.rows,), torch.float32)})


def _plan_both(
    x: Meta, target: Meta, labels: Meta | None, ignore: int, mode: int, beta: float, factor: float, over: int,
    device: int,
) -> Steps:  # fmt: skip
    rows, scratch, steps = x.rows, {}, []
    scratch["row_loss"] = Memory((rows,), torch.float32)
    factor, divide = resolve(x.shape, over, factor)
    counted = divide and labels is not None
    if counted:
        scratch["before"] = Memory((2,), torch.float32)
        steps.append(total_step(x, labels, ignore, True, factor, device, 0, "before"))
    results, scale = ("row_loss", 0, "dx", "before" if counted else 0), factor / rows if divide else factor
    terms = terms_step(x, target, labels, ignore, mode, beta, device, results, scale=scale)
    if terms is None:
        return Steps(instead=_both_in_fp32)
    total = total_step(x, labels, ignore, divide, factor, device, "row_loss", "total")
    return Steps(*steps, terms, total, scratch=scratch)


def _both_in_fp32(x: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total, dx = BOTH.launch(x.float(), target.float(), *rest)
    return total, dx.to(x.dtype)


def _plan_each(
    x: Meta, target: Meta, labels: Meta | None, ignore: int, mode: int, beta: float, device: int
) -> Steps:  # fmt: skip
    terms = terms_step(x, target, labels, ignore, mode, beta, device, (0, "each", 0, 0))
    if terms is None:
        return Steps(instead=lambda x, y, *rest: EACH.launch(x.float(), y.float(), *rest).to(x.dtype))
    return Steps(terms)


def _plan_bwd(*values: Any) -> Steps:
    step: Step | None = gradient_step(*values)
    return Steps(instead=_bwd_in_fp32) if step is None else Steps(step)


def _bwd_in_fp32(grad: Tensor, x: Tensor, target: Tensor, *rest: Any) -> Tensor:
    return BACKWARD.launch(grad.float(), x.float(), target.float(), *rest).to(x.dtype)


# ---- operators ------------------------------------------------------------------------------------------------------


def _reference_both(x, target, labels, ignore, mode, beta, factor, over):
    total = reference_fwd(x, target, labels, ignore, mode, beta, factor, over)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return total, reference_bwd(one, x, target, labels, total, ignore, mode, beta, False)


_INPUTS = Rows("x", None), Rows("target", None), Dense("labels", None, optional=True)
_OPTIONS, _TOTAL = "int ignore, int mode, float beta", Memory((2,), torch.float32)
FORWARD = Operator(
    "divergence_fwd", _INPUTS, options=f"{_OPTIONS}, float factor, int over", results="total",
    outputs=lambda *_: (_TOTAL,), plan=_plan_fwd, reference=reference_fwd, check=check,
)  # fmt: skip
BOTH = Operator(
    "divergence_both", _INPUTS, options=f"{_OPTIONS}, float factor, int over", results="total dx",
    outputs=lambda x, *_: (_TOTAL, Memory(x.shape, x.dtype)), plan=_plan_both, reference=_reference_both, check=check,
)  # fmt: skip
EACH = Operator(
    "divergence_each_fwd", _INPUTS, options=_OPTIONS, results="each",
    outputs=lambda x, *_: (Memory(x.shape, x.dtype),), plan=_plan_each, reference=reference_each, check=check,
)  # fmt: skip
BACKWARD = Operator(
    "divergence_bwd", (Rows("grad", None), *_INPUTS, Argument("total", None, optional=True)),
    options=f"{_OPTIONS}, bool in_target", results="out", outputs=lambda grad, x, *_: (Memory(x.shape, x.dtype),),
    plan=_plan_bwd, reference=reference_bwd, check=check_bwd,
)  # fmt: skip
