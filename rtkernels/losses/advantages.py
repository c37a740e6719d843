"""Advantages of completions of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.losses.shared import choice, values
from rtkernels.runtime.operator.arguments import check_integer

_EPS = 1e-4


def _by_prompt(rewards: Tensor, num_generations: int) -> Tensor:
    found = values("rewards", rewards, (1,)).detach()
    check_integer("num_generations", num_generations)
    if num_generations < 1 or found.shape[0] % num_generations:
        raise ArgumentError(
            f"num_generations is {num_generations}; expected a divisor of the {found.shape[0]} values of rewards"
        )
    return found.view(-1, num_generations)


def _nanstd(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the standard deviation of the values that are not NaN; 0 where there are fewer than two."""
    kept = ~x.isnan()
    n = kept.sum() if dim is None else kept.sum(dim, keepdim=True)
    mean = x.nanmean() if dim is None else x.nanmean(dim, keepdim=True)
    squares = torch.where(kept, (x - mean) ** 2, 0.0)
    total = squares.sum() if dim is None else squares.sum(dim, keepdim=True)
    return (total / (n - 1).clamp(min=1)).sqrt()


def group_advantages(rewards: Tensor, num_generations: int, *, scale: str = "group") -> Tensor:
    """Return GRPO's advantages: rewards less their mean over the completions of a prompt, divided by a deviation.

    Args:
        rewards: ``[prompts * num_generations]``, completions of a prompt side by side. NaN: no reward; it gets the
            advantage 0 and counts in no mean.
        num_generations: Number of completions per prompt.
        scale: "group" divides by the standard deviation of the prompt's completions, "batch" by that of all, "none"
            (Dr. GRPO) by nothing.

    Returns:
        Advantages of the shape of `rewards`, without gradient.
    """
    choice("scale", scale, ("group", "batch", "none"))
    grouped = _by_prompt(rewards, num_generations)
    advantages = grouped - grouped.nanmean(1, keepdim=True)
    if scale != "none" and grouped.numel():
        advantages = advantages / (_nanstd(grouped, 1 if scale == "group" else None) + _EPS)
    return torch.nan_to_num(advantages, nan=0.0).view(-1)


def leave_one_out_advantages(rewards: Tensor, num_generations: int, *, normalize: bool = False) -> Tensor:
    """Return RLOO's advantages: rewards less the mean over the other completions of a prompt.

    Args:
        rewards: ``[prompts * num_generations]``, completions of a prompt side by side. NaN: no reward.
        num_generations: Number of completions per prompt. 1: all advantages are 0.
        normalize: Subtract the mean of all advantages and divide by their standard deviation.

    Returns:
        Advantages of the shape of `rewards`, without gradient.
    """
    grouped = _by_prompt(rewards, num_generations)
    if num_generations == 1:
        return torch.zeros_like(grouped).view(-1)
    others = (~grouped.isnan()).sum(1, keepdim=True) - 1
    advantages = grouped - (grouped.nansum(1, keepdim=True) - grouped) / others
    if normalize and grouped.numel():
        advantages = (advantages - advantages.nanmean()) / (_nanstd(advantages) + _EPS)
    return torch.nan_to_num(advantages, nan=0.0).view(-1)
