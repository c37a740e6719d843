"""Sequences whose parts are on several processes: the order of parts, and what all processes have of them."""

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


def count(q: Tensor, group: Any, zigzag: bool | None) -> int:
    """Return how many parts of each sequence a member of the group has: one or two, 0 without a group."""
    if group is None:
        if zigzag:
            raise ArgumentError("zigzag is True and group is None; expected the group that has the other parts")
        return 0
    check_order(zigzag)
    if q.dim() != 4 or (zigzag and q.shape[1] % 2):
        raise ArgumentError(
            f"q has shape {tuple(q.shape)}; expected [batch, length, heads, width] with a group, and an even length "
            f"for zigzag"
        )
    return 2 if zigzag else 1


def as_batch(x: Tensor, parts: int) -> Tensor:
    """Return [batch, length, ..] as [parts * batch, length / parts, ..]; a copy if there are two of both."""
    return x.unflatten(1, (parts, x.shape[1] // parts)).transpose(0, 1).flatten(0, 1)


def joined(x: Tensor, parts: int) -> Tensor:
    """Return what ``as_batch`` was given."""
    return x.unflatten(0, (parts, x.shape[0] // parts)).transpose(0, 1).flatten(1, 2)


def gathered(own: Tensor, group: Any) -> tuple[list[Tensor], list[int]]:
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
