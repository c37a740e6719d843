"""Kahneman-Tversky optimisation: completions that are good or bad, without pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from rtkernels.errors import ArgumentError
from rtkernels.losses.shared import choice, counted, like, mask_of, number, values
from rtkernels.runtime.checks import check_shape, check_tensor


def _ratios(name: str, policy: Any, ref_name: str, ref: Any, mask: Any) -> Tensor:
    """Return the log-ratio of each sequence."""
    y, y_ref = values(name, policy), values(ref_name, ref)
    if y.dim() == 2:
        counts = mask_of("mask" if name == "logprobs" else "kl_mask", mask, y, name)
        y_ref = y_ref if y_ref.dim() == 1 else counted(like(ref_name, y_ref, y, name), counts).sum(1)
        y = counted(y, counts).sum(1)
    return y - like(ref_name, y_ref, y, name)


def kto(
    logprobs: Tensor, ref: Tensor, desirable: Tensor, *, mask: Tensor | None = None, kl_logprobs: Tensor | None = None,
    kl_ref: Tensor | None = None, kl_mask: Tensor | None = None, loss_type: str = "kto", beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, process_group: Any = None,
) -> Tensor:  # fmt: skip
    """Return the KTO loss of completions, each of which is desirable or not: a mean over completions.

    With the log-ratio ``r`` of a completion and the divergence ``k`` from the reference, desirable completions
    contribute ``1 - sigmoid(beta * (r - k))`` and the others ``1 - sigmoid(beta * (k - r))``, each times its weight.
    Losses that are NaN do not count.

    Args:
        logprobs: Log-probabilities under the policy: of tokens ``[B, T]``, or sums ``[B]``.
        ref: Those under the reference model, in the same shape or ``[B]``.
        desirable: ``[B]``, nonzero for desirable completions.
        mask: ``[B, T]``, nonzero for tokens of the completion. None: all tokens count.
        kl_logprobs: Log-probabilities of mismatched pairs, completions under the prompts of others, of which ``k``
            is the mean log-ratio, at least 0. None: ``k = 0``. No gradient flows here.
        kl_ref: Those under the reference model.
        kl_mask: The mask of `kl_logprobs`.
        loss_type: "kto", or "apo_zero_unpaired", which has no ``k``.
        beta: How strongly the policy is held at the reference.
        desirable_weight: Weight of desirable completions.
        undesirable_weight: Weight of the others.
        process_group: Processes of torch.distributed over which ``k`` is averaged. None: this process alone.

    Returns:
        A scalar.

    Raises:
        ArgumentError: Shapes do not fit, an option is unknown, or one of `kl_logprobs` and `kl_ref` is missing.
    """
    choice("loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    number("beta", beta, 0, above=True)
    number("desirable_weight", desirable_weight, 0)
    number("undesirable_weight", undesirable_weight, 0)
    r = _ratios("logprobs", logprobs, "ref", ref, mask)
    check_tensor("desirable", desirable)
    check_shape("desirable", desirable.shape, r.shape, "one value per completion")
    if (kl_logprobs is None) != (kl_ref is None):
        missing = "kl_ref" if kl_ref is None else "kl_logprobs"
        raise ArgumentError(f"{missing} is None; expected both kl_logprobs and kl_ref, or neither")
    k: Any = 0.0
    if loss_type == "kto" and kl_logprobs is not None:
        k = _ratios("kl_logprobs", kl_logprobs, "kl_ref", kl_ref, kl_mask).mean().detach()
        if process_group is not None:
            dist.all_reduce(k, group=process_group)
            k = k / dist.get_world_size(process_group)
        k = k.clamp(min=0)
    if loss_type == "kto":
        good, bad = 1 - torch.sigmoid(beta * (r - k)), 1 - torch.sigmoid(beta * (k - r))
    else:
        good, bad = 1 - torch.sigmoid(beta * r), torch.sigmoid(beta * r)
    return torch.where(desirable != 0, desirable_weight * good, undesirable_weight * bad).nanmean()
