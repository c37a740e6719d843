"""The operators of cross entropy: plans from the launches of ``cross_entropy_plan``, and the same in plain torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.ops.loss import reference
from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE, Call, check, check_options
from rtkernels.ops.loss.label_report import reported
from rtkernels.runtime.checks import check_same
from rtkernels.runtime.invariance import level
from rtkernels.runtime.operator.declared import Operator, Primitive
from rtkernels.runtime.operator.kinds import Argument, Dense, DenseFloat, InPlace, InPlaceRows, Meta, Rows
from rtkernels.runtime.operator.plan import Memory, Offset, Step, Steps


def _numbers(smoothing: float, z_loss: float, vocabulary: int) -> tuple[float, float, float]:
    return smoothing, z_loss, smoothing / vocabulary


def _row_names(reduction: int, accuracy: bool) -> tuple[str | int, str, str | int]:
    """Return the names of losses, statistics and correct of the rows: results themselves without a reduction."""
    losses, correct = ("loss", "hits") if reduction == NONE else ("losses", "correct")
    return losses, "stats", correct if accuracy else 0


def _plan_fwd(
    logits: Meta, labels: Meta, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    reduction: int, accuracy: bool, device: int,
) -> Steps:  # fmt: skip
    names, numbers = _row_names(reduction, accuracy), _numbers(label_smoothing, z_loss, logits.shape[-1])
    c = Call(logits, labels, ignore_index, numbers, softcap, device, ("logits", 0, *names))
    scratch = plans.row_memory(c.rows, accuracy) if reduction != NONE else {}
    sums, few_rows = ("loss", "hits", "factor"), None
    if not softcap:
        few_rows = plans.few_rows_step(c, plans.FEW_ROWS_FORWARD, reduction, 0, sums)
    if few_rows is not None:
        zeros = {} if reduction == NONE else {"arrived": 1}
        return Steps(few_rows, scratch=scratch, zeros=zeros, **reported(device))
    steps, zeros = _reduced(c, plans.forward_step(c, 0, c.cols), reduction, "factor")
    return Steps(*steps, scratch=scratch, zeros=zeros, **reported(device))


def _reduced(c: Call, step: Step, reduction: int, factor: str | int) -> tuple[list[Step], dict[str, int]]:
    if reduction == NONE:
        return [step], {}
    losses, _, correct = c.names[2:]
    sums, zeros = plans.reduce_step(c, losses, correct, ("loss", "hits", factor), reduction == MEAN, True)
    return [step, sums], zeros


def _plan_parts(
    logits: Meta, labels: Meta, ignore_index: int, label_smoothing: float, softcap: float, first: int, vocabulary: int,
    device: int,
) -> Steps:  # fmt: skip
    names = "logits", 0, 0, "parts", Offset("parts", 16 * logits.rows)
    c = Call(logits, labels, ignore_index, (label_smoothing, 0.0, 0.0), softcap, device, names)
    return Steps(plans.forward_step(c, first, vocabulary), **reported(device))


def _plan_bwd(
    dloss: Meta, logits: Meta, labels: Meta, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    first: int, vocabulary: int, device: int, out: str = "dlogits",
) -> Steps:  # fmt: skip
    if logits.rows == 0:
        return Steps()
    numbers = _numbers(label_smoothing, z_loss, vocabulary)
    c = Call(logits, labels, ignore_index, numbers, softcap, device, ("logits", out))
    stride = c.stride if out == "logits" else c.cols
    step = plans.backward_step(c, "dloss", dloss.numel() != 1, "stats", "factor", stride, first, vocabulary)
    return Steps(step, **(reported(device) | {"after": None}))


def _plan_grad(
    logits: Meta, labels: Meta, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    reduction: int, accuracy: bool, device: int, out: str = "dlogits",
) -> Steps:  # fmt: skip
    names, numbers = _row_names(reduction, accuracy), _numbers(label_smoothing, z_loss, logits.shape[-1])
    c = Call(logits, labels, ignore_index, numbers, softcap, device, ("logits", out, *names))
    stride = c.stride if out == "logits" else c.cols
    scratch = plans.row_memory(c.rows, accuracy) if reduction != NONE else {}
    # With a soft cap, arithmetic is the limit and a second read costs nothing. With batch invariance, losses have the
    # bits of a call without gradients.
    if softcap or level():
        number = Memory((1,), torch.float32) if reduction == MEAN else Memory((1,), torch.float32, fill=1.0)
        factor = "factor" if reduction == MEAN else 0
        steps, zeros = _reduced(c, plans.forward_step(c, 0, c.cols), reduction, factor)
        steps.append(plans.backward_step(c, "factor", False, "stats", 0, stride, 0, c.cols))
        return Steps(*steps, scratch=scratch | {"factor": number}, zeros=zeros, **reported(device))
    few_rows = plans.few_rows_step(c, plans.SHORT, reduction, stride, ("loss", "hits", 0))
    if few_rows is not None:
        zeros = {} if reduction == NONE else {"arrived": 1}
        return Steps(few_rows, scratch=scratch, zeros=zeros, **reported(device))
    counts, zeros = [], {}
    if reduction == MEAN:
        count, zeros = plans.reduce_step(c, 0, 0, (0, 0, "factor"), True, False, "count_parts")
        counts, scratch = [count], scratch | {"factor": Memory((1,), torch.float32)}
    step = plans.gradient_step(c, "factor" if counts else 0, stride, reduction == MEAN)
    steps, more = _reduced(c, step, reduction, 0)
    return Steps(*counts, *steps, scratch=scratch, zeros=zeros | more | _drawn(step), **reported(device))


def _drawn(step: Step) -> dict[str, int]:
    return {"drawn": 1} if "drawn" in step.arguments else {}


def _plan_chunk(
    logits: Meta, labels: Meta, factor: Meta | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, device: int,
) -> Steps:  # fmt: skip
    numbers = _numbers(label_smoothing, z_loss, logits.shape[-1])
    names = "logits", "logits", "losses", "stats", "correct"
    c = Call(logits, labels, ignore_index, numbers, softcap, device, names)
    kept = {"kept": reported(device)["kept"]}
    if softcap or level():
        scratch = {} if factor is not None else {"one": Memory((1,), torch.float32, fill=1.0)}
        dloss = "factor" if factor is not None else "one"
        gradient = plans.backward_step(c, dloss, False, "stats", 0, c.stride, 0, c.cols)
        return Steps(plans.forward_step(c, 0, c.cols), gradient, scratch=scratch, **kept)
    step = plans.gradient_step(c, "factor", c.stride, False)
    return Steps(step, zeros=_drawn(step), **kept)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_fwd(logits, labels, label_smoothing, softcap, z_loss=0.0, reduction=NONE) -> None:
    check(logits, labels)
    check_options(label_smoothing, z_loss, softcap, reduction)


def _check_bwd(dloss: Meta, logits: Meta, labels: Meta, stats: Meta) -> None:
    check(logits, labels)
    check_same("stats", tuple(stats.shape), (2, logits.rows), "shape", of="[2, rows]")
    if dloss.numel() != 1 and dloss.shape != labels.shape:
        raise ArgumentError(f"dloss has shape {tuple(dloss.shape)}; expected {tuple(labels.shape)}, or one number")


def _check_scale(dlogits: Meta, dloss: Meta) -> None:
    if dloss.numel() != 1 and dloss.shape != dlogits.shape[:-1]:
        wanted = tuple(dlogits.shape[:-1])
        raise ArgumentError(f"dloss has shape {tuple(dloss.shape)}; expected {wanted}, or one number")


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_bwd_in_place(
    dloss, logits, labels, stats, factor, ignore_index, label_smoothing, z_loss, softcap, first, vocabulary
):
    options = (ignore_index, label_smoothing, z_loss, softcap, first, vocabulary)
    logits.copy_(reference.backward(dloss, logits, labels, stats, factor, *options))


def _reference_grad(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    loss, hits, stats, factor = reference.forward(
        logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy
    )
    dloss = factor if reduction == MEAN else torch.ones(1, dtype=torch.float32, device=logits.device)
    options = (ignore_index, label_smoothing, z_loss, softcap, 0, logits.shape[-1])
    return loss, hits, stats, reference.backward(dloss, logits, labels, stats, None, *options)


def _reference_grad_in_place(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    *results, out = _reference_grad(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy)
    logits.copy_(out)
    return tuple(results)


def _reference_scale(dlogits: Tensor, dloss: Tensor) -> None:
    g = dloss.float()
    dlogits.copy_(dlogits.float() * (g if g.numel() == 1 else g.unsqueeze(-1)))


def _outputs(labels, reduction, accuracy):
    each = Memory(labels.shape if reduction == NONE else (), torch.float32)
    return each, each if accuracy else None, Memory((2, labels.numel()), torch.float32)


_LOGITS, _LABELS = Rows("logits", None), Dense("labels", None)
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_SAVED = _LABELS, Dense("stats", None), Argument("factor", None, optional=True)
FORWARD = Operator(
    "cross_entropy_fwd", (_LOGITS, _LABELS), options=f"{_OPTIONS}, int reduction, bool accuracy",
    results="loss hits stats factor", plan=_plan_fwd, reference=reference.forward, check=_check_fwd,
    outputs=lambda labels, reduction, accuracy: (
        *_outputs(labels, reduction, accuracy), None if reduction == NONE else Memory((1,), torch.float32),
    ),
)  # fmt: skip
PARTS = Operator(
    "cross_entropy_parts", (_LOGITS, _LABELS),
    options="int ignore_index, float label_smoothing, float softcap, int first, int vocabulary", results="parts",
    outputs=lambda labels: (Memory((5, labels.numel()), torch.float32),), plan=_plan_parts,
    reference=reference.parts, check=_check_fwd,
)  # fmt: skip
BACKWARD = Operator(
    "cross_entropy_bwd", (DenseFloat("dloss", None), plans.AlignedRows("logits", None), *_SAVED),
    options=f"{_OPTIONS}, int first, int vocabulary", results="dlogits",
    outputs=lambda logits: (Memory.like(logits),), plan=_plan_bwd, reference=reference.backward, check=_check_bwd,
    plans_empty=True,
)  # fmt: skip
BACKWARD_IN_PLACE = Operator(
    "cross_entropy_bwd_in_place", (DenseFloat("dloss", None), InPlaceRows("logits", None), *_SAVED),
    options=f"{_OPTIONS}, int first, int vocabulary", results="", plan=partial(_plan_bwd, out="logits"),
    reference=_reference_bwd_in_place, check=_check_bwd, plans_empty=True,
)  # fmt: skip
ONE_PASS = Operator(
    "cross_entropy_grad", (plans.AlignedRows("logits", None), _LABELS),
    options=f"{_OPTIONS}, int reduction, bool accuracy", results="loss hits stats dlogits",
    outputs=lambda logits, labels, reduction, accuracy: (
        *_outputs(labels, reduction, accuracy), Memory.like(logits),
    ),
    plan=_plan_grad, reference=_reference_grad, check=_check_fwd,
)  # fmt: skip
ONE_PASS_IN_PLACE = Operator(
    "cross_entropy_grad_in_place", (InPlaceRows("logits", None), _LABELS),
    options=f"{_OPTIONS}, int reduction, bool accuracy", results="loss hits stats", outputs=_outputs,
    plan=partial(_plan_grad, out="logits"), reference=_reference_grad_in_place, check=_check_fwd,
)  # fmt: skip
SCALE = Operator(
    "cross_entropy_scale", (InPlace("dlogits", None), DenseFloat("dloss", None)), results="", plan=plans.plan_scale,
    reference=_reference_scale, check=_check_scale,
)  # fmt: skip
# Overwrites dense logits [rows, vocabulary] with their gradient (times factor[0]) and fills in losses and stats: for
# callers that go through a long batch in chunks. No checks.
CHUNK = Primitive(
    "cross_entropy_chunk",
    (InPlace("logits", None), _LABELS, InPlace("losses", None), InPlace("stats", None),
     InPlace("correct", None, optional=True), Argument("factor", None, optional=True)),
    _OPTIONS, results="", plan=_plan_chunk,
)  # fmt: skip
