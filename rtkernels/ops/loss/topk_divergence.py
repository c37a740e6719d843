"""Divergence over the K tokens that a teacher names, with one class for all others, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = -1e-7  # of the logarithm of a sum of probabilities, so that the class of all others has some


def classes(logprobs: Tensor, support: Tensor, tail: bool) -> Tensor:
    """Return log-probabilities of the classes: with one for all others, or divided by their sum."""
    total = torch.logsumexp(logprobs.masked_fill(~support, -torch.inf), -1, keepdim=True)
    if not tail:
        return logprobs - total
    return torch.cat([logprobs, torch.log(-torch.expm1(total.clamp(max=_LARGEST)))], -1)


def divergences(log_q: Tensor, log_p: Tensor, support: Tensor, beta: float, tail: bool) -> Tensor:
    """Return the divergence of each position from log-probabilities ``[..., K]`` of student and teacher.

    `support`: False for entries that do not count. Positions without any give 0.
    """
    some = support.any(-1)
    inside = support | ~some.unsqueeze(-1)  # for finite gradients where nothing counts
    log_q = torch.where(some.unsqueeze(-1), log_q, -1.0)
    log_p = torch.where(some.unsqueeze(-1), log_p, -1.0)
    log_q, log_p = classes(log_q, inside, tail), classes(log_p, inside, tail)
    if tail:
        inside = torch.cat([inside, torch.ones_like(inside[..., :1])], -1)
    log_q, log_p = torch.where(inside, log_q, 0.0), torch.where(inside, log_p, 0.0)
    q, p = torch.where(inside, log_q.exp(), 0.0), torch.where(inside, log_p.exp(), 0.0)
    if beta == 0:
        each = torch.nan_to_num(p * (log_p - log_q), nan=0.0)
    elif beta == 1:
        each = torch.nan_to_num(q * (log_q - log_p), nan=0.0)
    else:
        mixed = ((1 - beta) * q + beta * p).clamp(min=torch.finfo(q.dtype).tiny)
        log_m = torch.where(inside, torch.log(mixed), 0.0)
        of_p, of_q = torch.nan_to_num(p * (log_p - log_m), nan=0.0), torch.nan_to_num(q * (log_q - log_m), nan=0.0)
        each = beta * of_p + (1 - beta) * of_q
    return torch.where(some, each.sum(-1), 0.0)
