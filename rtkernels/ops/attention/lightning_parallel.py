"""Linear attention of a sequence whose parts are on several processes: the states that parts begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError


def check_order(zigzag: bool | None) -> None:
    """Refuse a call that does not say which parts of a sequence a process has: results would be wrong in silence."""
    if not isinstance(zigzag, bool):
        raise ArgumentError(
            f"zigzag is {zigzag}; expected False if rank r of the group has part r of each sequence, True if it has "
            "parts r and 2 n - 1 - r of 2 n"
        )


def _gathered(own: Tensor, group: Any) -> tuple[list[Tensor], list[int]]:
    """Return what all members have of all parts, in the order of the sequence, and the numbers of this member's parts.

    Args:
        own: [parts, ...]: of one part, that of the rank's number; or of two, r and ``2 n - 1 - r`` of ``2 n``.
        group: Of n processes.
    """
    members, rank, parts = torch.distributed.get_world_size(group), torch.distributed.get_rank(group), own.shape[0]
    everything = own.new_empty(members * parts, *own.shape[1:])
    torch.distributed.all_gather_into_tensor(everything, own.contiguous(), group=group)
    ordered = list(everything[::parts].unbind())
    if parts == 1:
        return ordered, [rank]
    return ordered + list(everything[1::2].flip(0).unbind()), [rank, 2 * members - 1 - rank]


class _StateBefore(torch.autograd.Function):
    """The states after all parts before each of this member's; each part multiplies them by `factor`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, factor: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.group = group
        parts, mine = _gathered(own, group)
        state, states = torch.zeros_like(own[0]), []
        for part in parts[: mine[-1] + 1]:
            states.append(state)
            state = state * factor + part
        return torch.stack([states[number] for number in mine])

    @staticmethod
    def backward(ctx: Any, dstates: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        parts, mine = _gathered(dstates, ctx.group)
        gradient, gradients = torch.zeros_like(dstates[0]), {}
        for number in range(len(parts) - 1, mine[0] - 1, -1):
            gradients[number] = gradient
            gradient = gradient * factor + parts[number]
        return torch.stack([gradients[number] for number in mine]), None, None


def state_before(own: Tensor, decay: Tensor, length: int, group: Any) -> Tensor:
    """Return the state after all parts before each of this member's.

    Args:
        own: float32 [parts, batch, heads, width of k, width of v]: the state that each of this member's parts leaves
            alone; one part, or two in zigzag order.
        decay: float32 [heads].
        length: Of a part, the same for all members.
        group: Of processes; the parts are in the order of their ranks.
    """
    return _StateBefore.apply(own, torch.exp(-decay * length).view(-1, 1, 1), group)
