"""Divergence of a head from a teacher that names its likeliest tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss.linear_logprob import linear_logprob
from rtkernels.ops.loss.topk_divergence import divergences
from rtkernels.runtime.checks import check_dtype, check_shape

_IGNORED = -100


def linear_topk_divergence(
    hidden: Tensor, weight: Tensor, ids: Tensor, logprobs: Tensor, labels: Tensor | None, ignore_index: int,
    beta: float, temperature: float, tail: bool, more: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return the divergence of each row; `more` are options of ``linear_logprob``."""
    if not 0.0 <= beta <= 1.0:
        raise ArgumentError(f"beta is {beta}; expected 0 to 1")
    check_dtype("teacher_ids", ids.dtype)
    rows = tuple(hidden.shape[:-1])
    if ids.dim() != hidden.dim() or tuple(ids.shape[:-1]) != rows or ids.shape[-1] == 0:
        raise ArgumentError(f"teacher_ids has shape {tuple(ids.shape)}; expected {(*rows, 'K')} with K of at least 1")
    check_shape("teacher_logprobs", logprobs.shape, ids.shape, "that of teacher_ids")
    if not logprobs.is_floating_point():
        raise ArgumentError(f"teacher_logprobs has dtype {logprobs.dtype}; expected floating point")
    log_p = logprobs.detach().float()
    support = log_p > -torch.inf
    if labels is not None:
        check_dtype("labels", labels.dtype)
        check_shape("labels", labels.shape, rows, "that of student_hidden without its last one")
        support = support & (labels != ignore_index).unsqueeze(-1)
    chosen = torch.where(support, ids, _IGNORED)
    log_q = linear_logprob(
        hidden, weight, chosen, ignore_index=_IGNORED, temperature=temperature, fp32_logits=True, **more
    )  # fmt: skip
    return divergences(log_q, log_p, support, beta, bool(tail))
