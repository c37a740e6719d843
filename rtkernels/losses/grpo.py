"""Policy-gradient losses with advantages of groups: GRPO and its relatives, and RLOO."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.losses.ratios import kl_penalty, of_tokens
from rtkernels.losses.shared import choice, counted, divisor, either, like, mask_of, number, values
from rtkernels.runtime.checks import check_shape, check_tensor

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")
_OF_BATCH = ("dapo", "cispo", "vespo")  # divided by the tokens of the whole batch
_SMALLEST, _LARGEST = math.log(1e-8), 20.0  # logarithms of VESPO's ratios
_LAMBDA = 1e-4


def _clipped(q: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None) -> Tensor:
    bounded = q.clamp(1 - epsilon, 1 + epsilon_high)
    q = q if delta is None else q.clamp(max=delta)
    return -torch.minimum(q * advantages, bounded * advantages)


def _gamma_weights(advantages, log_ratio: Tensor, mask: Tensor, sampler: Tensor | None, positive, negative) -> Tensor:
    """Return VESPO's weights ``w^k exp(g (1 - w))`` of sequences with ratio w; (k, g) by the advantage's sign."""
    log_w = counted(log_ratio.detach().clamp(-_LARGEST, _LARGEST), mask).sum(1, keepdim=True)
    if sampler is not None:
        log_w = log_w + sampler.log().clamp(_SMALLEST, _LARGEST).sum(1, keepdim=True)
    log_w = log_w.clamp(_SMALLEST, _LARGEST)
    k = either(advantages >= 0, positive[0], negative[0], log_w)
    g = either(advantages >= 0, positive[1], negative[1], log_w).clamp(min=_LAMBDA)
    return torch.exp(g + k * log_w - g * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _factor(name: str, given: Any, tokens: Tensor) -> Tensor:
    """Return factors of tokens ``[B, T]`` or of sequences ``[B, 1]``, ``[B]``."""
    check_tensor(name, given)
    if given.dim() == 1:
        given = given[:, None]
    wanted = (tokens.shape[0], 1) if given.dim() == 2 and given.shape[1] == 1 else tokens.shape
    check_shape(name, given.shape, wanted, "of tokens; or one value per sequence")
    return given.detach().to(tokens.dtype)


def _reduced(x: Tensor, mask: Tensor, loss_type: str, num_items: Any, max_length: int | None, steps: Any) -> Tensor:
    x = counted(x.expand_as(mask), mask)
    if loss_type in _OF_BATCH:
        return x.sum() / (mask.sum().clamp(min=1) if num_items is None else divisor("num_items", num_items, x.device))
    if loss_type in ("grpo", "sapo"):
        loss = (x.sum(1) / mask.sum(1).clamp(min=1)).mean()
    elif loss_type == "bnpo":
        loss = x.sum() / mask.sum().clamp(min=1)
    elif loss_type == "dr_grpo":
        loss = x.sum() / (x.shape[0] * max_length)
    else:
        loss = x.sum(1).mean()
    return loss / steps


def grpo(
    logprobs: Tensor, advantages: Tensor, *, old: Tensor | None = None, ref: Tensor | None = None,
    mask: Tensor | None = None, loss_type: str = "dapo", importance_sampling_level: str = "token",
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, beta: float = 0.0,
    kl: str = "k3", kl_times_ratio: bool = True, sampler_ratio: Tensor | None = None, keep: Tensor | None = None,
    num_items: Any = None, max_completion_length: int | None = None, accumulation_steps: int = 1,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05), vespo_positive: tuple[float, float] = (2.0, 3.0),
    vespo_negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:  # fmt: skip
    """Return the loss of GRPO or one of its relatives from log-probabilities of sampled completions.

    With the ratio ``q = exp(logprobs - old)``, a token's loss is ``-min(q A, clamp(q, 1 - epsilon, 1 + epsilon_high)
    A)`` for "grpo", "bnpo", "dr_grpo", "dapo" and "luspo", which differ in the reduction; ``-min(q, epsilon_high) A
    logprobs`` for "cispo"; a sigmoid of ``q`` for "sapo"; a weight of the sequence's ratio for "vespo". GSPO is
    ``importance_sampling_level="sequence"``.

    Args:
        logprobs: Log-probabilities ``[B, T]`` of the completions under the policy.
        advantages: ``[B]``, or ``[B, T]`` of tokens; see :func:`group_advantages`.
        old: Log-probabilities at the time of sampling. None: those of `logprobs`, so that every ratio is 1.
        ref: Log-probabilities under the reference model; needed if `beta` is not 0.
        mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        loss_type: "dapo" (sum over tokens divided by `num_items`), "grpo" (mean over sequences of means over tokens),
            "bnpo" (mean over tokens), "dr_grpo" (sum divided by ``B * max_completion_length``), "luspo" (mean over
            sequences of sums), "cispo" and "vespo" (as "dapo"), "sapo" (as "grpo").
        importance_sampling_level: "token", or "sequence": the ratio is that of the mean over a sequence.
        epsilon: How far below 1 a ratio counts.
        epsilon_high: How far above 1. None: `epsilon`. For "cispo" the largest ratio itself.
        delta: Upper limit of the ratio that is not clipped, for negative advantages. None: no limit.
        beta: Weight of the divergence from the reference.
        kl: "k1", "k2" or "k3", as in :func:`kl_penalty`.
        kl_times_ratio: Multiply the divergence by the ratio, which makes its estimate unbiased off policy.
        sampler_ratio: Factors ``[B, T]`` or ``[B, 1]`` for the sampling engine's mismatch; see :func:`sampler_ratio`.
        keep: Factors ``[B, T]`` or ``[B, 1]``: :func:`off_policy_mask`, :func:`entropy_mask`, or their product.
        num_items: Tokens of the whole batch per process, a number or a tensor with one value, for "dapo", "cispo" and
            "vespo". None: the tokens of this call.
        max_completion_length: The constant of "dr_grpo".
        accumulation_steps: Number of calls whose gradients are added up, for types that `num_items` does not divide.
        sapo_temperatures: For "sapo": temperatures for positive and for other advantages.
        vespo_positive: For "vespo": exponent and rate for advantages of at least 0.
        vespo_negative: For "vespo": exponent and rate for negative advantages.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, an option is unknown or out of range, or one that a type needs is missing.
    """
    choice("loss_type", loss_type, _TYPES)
    choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    number("epsilon", epsilon, 0)
    number("beta", beta, 0)
    number("accumulation_steps", accumulation_steps, 1)
    epsilon_high = epsilon if epsilon_high is None else number("epsilon_high", epsilon_high, 0)
    lp = values("logprobs", logprobs, (2,))
    counts = mask_of("mask", mask, lp, "logprobs")
    lp = counted(lp, counts)
    a = of_tokens(advantages, lp)
    if beta and ref is None:
        raise ArgumentError("ref is None; expected the reference's log-probabilities, because beta is not 0")
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ArgumentError("max_completion_length is None; expected a number, which loss_type 'dr_grpo' needs")
        number("max_completion_length", max_completion_length, 1)
    before = lp.detach() if old is None else counted(like("old", old, lp, "logprobs").detach(), counts)
    log_ratio = lp - before
    log_q = log_ratio
    if importance_sampling_level == "sequence":
        log_q = log_ratio.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    q = torch.exp(log_q)
    factor = None if sampler_ratio is None else _factor("sampler_ratio", sampler_ratio, lp)
    if loss_type in _CLIPPED:
        x = _clipped(q, a, epsilon, epsilon_high, None if delta is None else number("delta", delta, 1))
    elif loss_type == "cispo":
        x = -q.clamp(max=epsilon_high).detach() * a * lp
    elif loss_type == "sapo":
        t = either(a > 0, *sapo_temperatures, lp)
        x = -torch.sigmoid(t * (q - 1)) * 4 / t * a
    else:
        x = -_gamma_weights(a, log_ratio, counts, factor, vespo_positive, vespo_negative) * a * lp
    if keep is not None:
        x = x * _factor("keep", keep, lp)
    if factor is not None and loss_type != "vespo":
        x = x * factor
    if beta:
        penalty = kl_penalty(lp, counted(like("ref", ref, lp, "logprobs").detach(), counts), kind=kl)
        x = x + beta * (penalty * q if kl_times_ratio else penalty)
    return _reduced(x, counts, loss_type, num_items, max_completion_length, accumulation_steps)


def rloo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, mask: Tensor | None = None, epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss of RLOO: a clipped ratio of whole sequences, its mean over them.

    Args:
        logprobs: Log-probabilities of the completions under the policy: of tokens ``[B, T]``, or sums ``[B]``.
        old: Those at the time of sampling, in the same shape or ``[B]``.
        advantages: ``[B]``; see :func:`leave_one_out_advantages`.
        mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        epsilon: How far below 1 a ratio counts.
        epsilon_high: How far above 1. None: `epsilon`.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, or an option is out of range.
    """
    number("epsilon", epsilon, 0)
    epsilon_high = epsilon if epsilon_high is None else number("epsilon_high", epsilon_high, 0)
    y, before = values("logprobs", logprobs), values("old", old).detach()
    if y.dim() == 2:
        counts = mask_of("mask", mask, y, "logprobs")
        before = before if before.dim() == 1 else counted(like("old", before, y, "logprobs"), counts).sum(1)
        y = counted(y, counts).sum(1)
    q = torch.exp(y - like("old", before, y, "logprobs"))
    a = like("advantages", advantages, y, "sequences")
    return _clipped(q, a, epsilon, epsilon_high, None).mean()
