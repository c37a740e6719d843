"""Distillation from a teacher of which only the largest log-probabilities are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.losses.shared import counted, divisor, like, mask_of, number, values
from rtkernels.ops.loss.topk_divergence import divergences
from rtkernels.runtime.checks import check_shape, check_tensor


def topk_distillation(
    student: Tensor, teacher: Tensor, *, support: Tensor | None = None, mask: Tensor | None = None, beta: float = 0.0,
    tail: bool = True, num_items: Any = None,
) -> Tensor:  # fmt: skip
    """Return the divergence between student and teacher over K tokens that the teacher named at each position.

    The student's log-probabilities are those of ``rtkernels.linear_logprob(hidden, weight, ids)`` with the ids
    ``[..., K]`` of the teacher; :func:`rtkernels.linear_divergence` computes both. For teachers with logits, see
    :func:`rtkernels.jsd`.

    Args:
        student: Log-probabilities of K tokens ``[..., K]``.
        teacher: The teacher's log-probabilities of the same tokens. No gradient flows here unless it is asked for.
        support: ``[..., K]``, zero for entries that do not count: padding, or a token that occurs twice.
        mask: ``[...]``, nonzero for positions that count. None: all do.
        beta: 0 is the forward Kullback-Leibler divergence, 1 the reverse one, numbers between them the generalised
            Jensen-Shannon divergence.
        tail: Add a class with the probability of all other tokens. Otherwise both are divided by their sums.
        num_items: What the sum is divided by: tokens of the whole batch, a number or a tensor with one value. None:
            the number of positions that count.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, or `beta` is not between 0 and 1.
    """
    number("beta", beta, 0, 1.0000001)
    dims = tuple(range(1, 9))
    q = values("student", student, dims)
    p = like("teacher", teacher, q, "student")
    inside = torch.ones_like(q, dtype=torch.bool)
    if support is not None:
        check_tensor("support", support)
        check_shape("support", support.shape, q.shape, "that of student")
        inside = support != 0
    counts = mask_of("mask", mask, q[..., 0] if q.shape[-1] else q.sum(-1), "positions of student")
    total = counted(divergences(q, p, inside, beta, tail), counts).sum()
    return total / (counts.sum().clamp(min=1) if num_items is None else divisor("num_items", num_items, q.device))
