"""Look-ups in a vocabulary that is split over processes: what they exchange, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.runtime.operator.autograd import differentiable, once_differentiable


class _Sum(torch.autograd.Function):
    """The sum over all members; each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(part)
        torch.distributed.all_reduce(part, group=group)
        return part

    @staticmethod
    @differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SumOfOwn(torch.autograd.Function):
    """The sum over all members of the rows that belong to this one; its gradient goes to all of them."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        members = torch.distributed.get_world_size(group)
        own = parts.new_empty(parts.shape[0] // members, *parts.shape[1:])
        torch.distributed.reduce_scatter_tensor(own, parts, group=group)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _gathered(dy.contiguous(), ctx.group), None


def _gathered(own: Tensor, group: Any) -> Tensor:
    members = torch.distributed.get_world_size(group)
    everything = own.new_empty(members * own.shape[0], *own.shape[1:])
    torch.distributed.all_gather_into_tensor(everything, own, group=group)
    return everything


def looked_up_over(group: Any, local: Callable[[Tensor], Tensor], ids: Tensor, same_ids: bool) -> Tensor:
    """Return the rows of `ids`, of which each member of a process group has some (``local`` gives zeros for others)."""
    if same_ids:
        return _Sum.apply(local(ids), group)
    flat = ids.reshape(-1)
    own = _SumOfOwn.apply(local(_gathered(flat.contiguous(), group)), group)
    return own.view(*ids.shape, own.shape[-1])
