"""Sums over the rows of cross entropy: the loss, the accuracy, and how many rows count."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.loss.cross_entropy_plan import MEAN, Call, reduce_step
from rtkernels.runtime.layout import nothing
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Steps


def _call(labels: Meta, ignore_index: int, device: int) -> Call:
    logits = Meta(torch.float32, (*labels.shape, 1), (*labels.stride, 1), device, 0)
    return Call(logits, labels, ignore_index, (), 0.0, device, ())


def _plan_count(labels: Meta, ignore_index: int, device: int) -> Steps:
    step, zeros = reduce_step(_call(labels, ignore_index, device), 0, 0, (0, 0, "factor"), True, False)
    return Steps(step, zeros=zeros)


def _plan_reduce(labels: Meta, ignore_index: int, reduction: int, device: int) -> Steps:
    c, results = _call(labels, ignore_index, device), ("loss", "accuracy", 0)
    step, zeros = reduce_step(c, "losses", "correct", results, reduction == MEAN, True)
    return Steps(step, zeros=zeros)


def _no_rows(losses: Tensor, correct: Tensor | None) -> tuple[Tensor, Tensor]:
    return losses.new_zeros(()), nothing(losses) if correct is None else losses.new_zeros(())


_NUMBER = Memory((), torch.float32)
_LABELS = Dense("labels", None)
# 1 / rows that count, [1].
COUNT = Primitive(
    "cross_entropy_count", (_LABELS,), "ignore_index", results="factor",
    outputs=lambda: (Memory((1,), torch.float32),), plan=_plan_count, plans_empty=True,
)  # fmt: skip
# Loss and accuracy from the numbers of the rows.
REDUCE = Primitive(
    "cross_entropy_reduce", (Dense("losses", None), Dense("correct", None, optional=True), _LABELS),
    "ignore_index, reduction", results="loss accuracy",
    outputs=lambda correct: (_NUMBER, None if correct is None else _NUMBER), plan=_plan_reduce,
    reference=_no_rows,
)  # fmt: skip
