"""Divergence of two heads over a vocabulary that is split between the processes of a group."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.loss import linear_divergence_operators as whole
from rtkernels.ops.loss.cross_entropy_parallel import gathered
from rtkernels.ops.loss.linear_divergence_operators import Heads
from rtkernels.ops.loss.linear_divergence_rows import FORWARD_KL, MIXED, PLAIN, WITH_KERNELS, Functions, kind_of
from rtkernels.runtime.checks import check_shape
from rtkernels.runtime.operator.declared import Dense, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps


def _heads(student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, chunk_bytes):
    student = student_hidden, student_weight, student_bias
    return Heads(student, (teacher_hidden, teacher_weight, teacher_bias), chunk_bytes)


def _parts(
    functions: Functions, student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias,
    labels, ignore_index, beta, temperature, chunk_bytes,
):  # fmt: skip
    """The operator ``linear_divergence_own_parts``."""
    tensors = student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias
    ids = whole.row_ids(student_hidden, labels, ignore_index)
    return whole.parts_of(functions, _heads(*tensors, chunk_bytes), ids, beta, temperature)


def _sums(
    functions: Functions, student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias,
    labels, stats, ignore_index, beta, temperature, chunk_bytes,
):  # fmt: skip
    """The operator ``linear_divergence_own_sums``."""
    tensors = student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias
    ids = whole.row_ids(student_hidden, labels, ignore_index)
    return whole.sums_of(functions, _heads(*tensors, chunk_bytes), stats, ids, beta, temperature)


def folded(every: Tensor, beta: float) -> Tensor:
    """Return the parts ``[5, rows]`` of all columns from those ``[n, 5, rows]`` of the processes."""
    own = 1 if kind_of(beta) == FORWARD_KL else 0  # the distribution that weights the terms
    found, cross = [], every[0, 4]
    for place, (tops, sums) in enumerate(((every[:, 0], every[:, 1]), (every[:, 2], every[:, 3]))):
        top = tops.amax(0)
        factor = torch.where(tops == -torch.inf, 0.0, (tops - top).exp())
        found += [top, (factor * sums).sum(0)]
        if place == own:
            cross = (factor * every[:, 4]).sum(0)
    return torch.stack((*found, cross))


def forward(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], group: Any) -> tuple[Tensor, Tensor]:
    """Return divergence and stats as ``linear_divergence_fwd`` does, the same on every process."""
    beta, shape = options[1], tensors[0].shape[:-1]
    stats = folded(gathered(PARTS(*tensors, *options), group), beta)
    if kind_of(beta) != MIXED:
        stats = whole.finished(stats, beta)
        return stats[4].clone().view(shape), stats
    stats[1].log_()
    stats[3].log_()
    sums = gathered(SUMS(*tensors, stats, *options), group).sum(0)
    stats[4] = sums[1]
    return sums[0].clone().view(shape), stats


def _check_sums(
    student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, labels, stats, beta,
    temperature, chunk_bytes,
) -> None:  # fmt: skip
    heads = (student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias)
    whole.check_inputs(*heads, labels, beta, temperature, chunk_bytes)
    check_shape("stats", stats.shape, (5, student_hidden.rows), "[5, rows]")


def _of_rows(count: int) -> Any:
    return lambda student_hidden: (Memory((count, student_hidden.rows), torch.float32),)


PARTS = Operator(
    "linear_divergence_own_parts", whole.TENSORS, options=whole.OPTIONS, results="parts", outputs=_of_rows(5),
    check=whole.check_inputs, plans_empty=True, reference=partial(_parts, PLAIN),
    plan=lambda student_hidden: (
        Steps(instead=partial(_parts, WITH_KERNELS)) if student_hidden.rows else IN_TORCH
    ),
)  # fmt: skip
SUMS = Operator(
    "linear_divergence_own_sums", (*whole.TENSORS, Dense("stats", None)), options=whole.OPTIONS, results="sums",
    outputs=_of_rows(2), check=_check_sums, plans_empty=True, reference=partial(_sums, PLAIN),
    plan=lambda student_hidden: (
        Steps(instead=partial(_sums, WITH_KERNELS)) if student_hidden.rows else IN_TORCH
    ),
)  # fmt: skip
