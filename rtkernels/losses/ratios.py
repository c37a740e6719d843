"""Parts of policy-gradient losses: divergence from a reference, the sampler's ratio, and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rtkernels.losses.shared import choice, counted, like, mask_of, number, values
from rtkernels.runtime.checks import check_shape

_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def kl_penalty(
    logprobs: Tensor, ref: Tensor, *, kind: str = "k3", max_log_ratio: float | None = None, max_kl: float | None = None
) -> Tensor:
    """Return an estimate of the divergence from a reference at each token.

    With ``d = ref - logprobs``: "k1" is ``-d``, "k2" ``d^2 / 2`` and "k3" ``exp(d) - d - 1``, which is never negative.

    Args:
        logprobs: Log-probabilities under the policy, ``[B, T]`` or ``[B]``.
        ref: Those under the reference model.
        kind: "k1", "k2" or "k3".
        max_log_ratio: For "k3": clamp ``d`` to this magnitude; verl uses 20. None: no limit, as in TRL.
        max_kl: For "k3": clamp the result to this magnitude; verl uses 10.

    Returns:
        A tensor of the shape of `logprobs`.
    """
    choice("kind", kind, ("k1", "k2", "k3"))
    own = values("logprobs", logprobs)
    d = like("ref", ref, own, "logprobs") - own
    if kind == "k1":
        return -d
    if kind == "k2":
        return d * d / 2
    if max_log_ratio is not None:
        number("max_log_ratio", max_log_ratio, 0)
        d = d.clamp(-max_log_ratio, max_log_ratio)
    kl = torch.exp(d) - d - 1
    return kl if max_kl is None else kl.clamp(-number("max_kl", max_kl, 0), max_kl)


def sampler_ratio(
    old: Tensor, sampler: Tensor, *, mask: Tensor | None = None, mode: str = "sequence_mask",
    clip_min: float | None = None, clip_max: float | None = 3.0,
) -> Tensor:  # fmt: skip
    """Return how much likelier completions are for the trainer than for the engine that sampled them.

    The ratio is ``exp(old - sampler)`` of tokens, or of the sums over sequences. A sampler's log-probability that is
    NaN counts as equal to the trainer's.

    Args:
        old: Log-probabilities ``[B, T]`` under the trainer's weights at the time of sampling.
        sampler: Those that the engine reported.
        mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        mode: "token_truncate" and "sequence_truncate" clamp ratios to the limits; "token_mask" and "sequence_mask"
            set those outside of the limits to 0.
        clip_min: Lower limit; None: no limit.
        clip_max: Upper limit; None: no limit.

    Returns:
        Ratios without gradient: ``[B, T]`` of tokens, ``[B, 1]`` of sequences.
    """
    choice("mode", mode, _MODES)
    before = values("old", old, (2,)).detach()
    counts = mask_of("mask", mask, before, "old")
    d = torch.nan_to_num(counted(before - like("sampler", sampler, before, "old").detach(), counts), nan=0.0)
    level, _, what = mode.partition("_")
    ratio = torch.exp(d.sum(1, keepdim=True) if level == "sequence" else d)
    low = -math.inf if clip_min is None else number("clip_min", clip_min)
    high = math.inf if clip_max is None else number("clip_max", clip_max)
    if what == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def off_policy_mask(
    logprobs: Tensor, sampler: Tensor, advantages: Tensor, threshold: float, *, mask: Tensor | None = None
) -> Tensor:
    """Return 1 for sequences to keep, 0 for those with a negative advantage that have moved away from the policy.

    Args:
        logprobs: Log-probabilities ``[B, T]`` under the policy.
        sampler: Those at the time of sampling. NaN counts as equal.
        advantages: ``[B]`` or ``[B, T]``.
        threshold: The largest mean of ``sampler - logprobs`` at which a sequence is kept whatever its advantage.
        mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.

    Returns:
        A mask without gradient: ``[B, 1]``, or ``[B, T]`` if advantages are those of tokens.
    """
    own = values("logprobs", logprobs, (2,)).detach()
    counts = mask_of("mask", mask, own, "logprobs")
    number("threshold", threshold)
    kl = torch.nan_to_num(counted(like("sampler", sampler, own, "logprobs") - own, counts), nan=0.0)
    mean = kl.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    return ((of_tokens(advantages, own) >= 0) | (mean <= threshold)).to(own.dtype)


def entropy_mask(entropy: Tensor, fraction: float, *, mask: Tensor | None = None) -> Tensor:
    """Return True for the tokens with the largest entropy. With several processes, pass the entropies of all.

    Args:
        entropy: Entropies ``[B, T]``, as :func:`rtkernels.linear_logprob` returns them.
        fraction: The fraction of tokens to keep: entropies at or above the quantile ``1 - fraction``.
        mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.

    Returns:
        A boolean mask ``[B, T]``.
    """
    found = values("entropy", entropy, (2,)).detach()
    number("fraction", fraction, 0, 1.0000001)
    counts = mask_of("mask", mask, found, "entropy") != 0
    if not found.numel():
        return counts
    of_counted = torch.where(counts, found, math.nan).reshape(-1)
    return (found >= torch.nanquantile(of_counted, 1 - fraction)) & counts


def of_tokens(advantages: Tensor, tokens: Tensor) -> Tensor:
    """Return advantages as ``[B, 1]`` or ``[B, T]``."""
    found = values("advantages", advantages)
    if found.dim() == 2:
        check_shape("advantages", found.shape, tokens.shape, "that of logprobs")
        return found
    check_shape("advantages", found.shape, tokens.shape[:1], "one value per sequence")
    return found[:, None]
