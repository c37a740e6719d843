"""Linear attention of a sequence whose parts are on several processes: the state that a part begins with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _gathered(own: Tensor, group: Any) -> Tensor:
    members = torch.distributed.get_world_size(group)
    everything = own.new_empty(members * own.shape[0], *own.shape[1:])
    torch.distributed.all_gather_into_tensor(everything, own.contiguous(), group=group)
    return everything.view(members, *own.shape)


class _StateBefore(torch.autograd.Function):
    """The state after the parts of all previous members; each part multiplies it by `factor`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, factor: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.group = group
        state = torch.zeros_like(own)
        for part in _gathered(own, group)[: torch.distributed.get_rank(group)]:
            state = state * factor + part
        return state

    @staticmethod
    def backward(ctx: Any, dstate: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        gradient = torch.zeros_like(dstate)
        for part in reversed(_gathered(dstate, ctx.group)[torch.distributed.get_rank(ctx.group) + 1 :].unbind()):
            gradient = gradient * factor + part
        return gradient, None, None


def state_before(own: Tensor, decay: Tensor, length: int, group: Any) -> Tensor:
    """Return the state after the parts of all previous members.

    Args:
        own: float32 [batch, heads, width of k, width of v]: the state that this member's part leaves alone.
        decay: float32 [heads].
        length: Of a part, the same for all members.
        group: Of processes; the parts are in the order of their ranks.
    """
    return _StateBefore.apply(own, torch.exp(-decay * length).view(-1, 1, 1), group)
