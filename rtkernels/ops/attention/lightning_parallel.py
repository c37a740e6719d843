"""Linear attention of a sequence whose parts are on several processes: the states that parts begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.attention.sequence_parts import gathered
from rtkernels.runtime.operator.autograd import once_differentiable


class _StateBefore(torch.autograd.Function):
    """The states after all parts before each of this member's; each part multiplies them by `factor`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, factor: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.group = group
        parts, mine = gathered(own, group)
        state, states = torch.zeros_like(own[0]), []
        for part in parts[: mine[-1] + 1]:
            states.append(state)
            state = state * factor + part
        return torch.stack([states[number] for number in mine])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        parts, mine = gathered(dstates, ctx.group)
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
