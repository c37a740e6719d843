"""Muon's updates of sharded matrices: each process computes whole matrices, and rows are sent there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Orthogonal = Callable[[Tensor], Tensor]


def orthogonalized(params: Sequence[Any], updates: Sequence[Tensor], orthogonal: Orthogonal) -> list[Tensor]:
    """Return this process's shards of the orthogonalised updates.

    Args:
        params: DTensors of one shape, mesh and sharding.
        updates: This process's shards, bfloat16.
        orthogonal: Orthogonalises a batch of bfloat16 matrices, which it overwrites.
    """
    p = params[0]
    splits = [dim for dim, place in enumerate(p.placements) if place.is_shard()]
    shape = updates[0].shape
    if all(p.placements[dim].dim < p.dim() - 2 for dim in splits):  # whole matrices, also if nothing is split
        if not updates[0].numel():
            return list(updates)
        x = torch.stack(updates)
        return list(orthogonal(x.reshape(-1, *shape[-2:])).reshape(x.shape).unbind(0))
    if len(splits) == 1 and p.dim() == 2 and p.placements[splits[0]].dim == 0 and _is_plain(p.placements[splits[0]]):
        return _by_owners(p, updates, orthogonal, p.device_mesh.get_group(splits[0]))
    return _gathered(params, updates, orthogonal)


def _is_plain(place: Any) -> bool:
    from torch.distributed.tensor import Shard

    return type(place) is Shard


def _by_owners(p: Any, updates: Sequence[Tensor], orthogonal: Orthogonal, process_group: Any) -> list[Tensor]:
    """Matrix i belongs to process i modulo their number."""
    world, rank = process_group.size(), process_group.rank()
    rows, cols = p.shape
    each = -(-rows // world)  # rows of a shard, as torch.chunk cuts them; the last ones may be short or empty
    heights = [max(min(rows, (r + 1) * each) - r * each, 0) for r in range(world)]
    owned = [list(range(owner, len(updates), world)) for owner in range(world)]
    device = updates[0].device
    sent = torch.cat([updates[i].reshape(-1) for mine in owned for i in mine])
    to_owners = [len(mine) * heights[rank] * cols for mine in owned]
    from_all = [len(owned[rank]) * height * cols for height in heights]
    got = torch.empty(sum(from_all), dtype=torch.bfloat16, device=device)
    torch.distributed.all_to_all_single(got, sent, from_all, to_owners, group=process_group)
    if owned[rank]:
        count = len(owned[rank])
        parts = [part.view(count, height, cols) for part, height in zip(got.split(from_all), heights, strict=True)]
        whole = orthogonal(torch.cat(parts, 1)).bfloat16()
        got = torch.cat([part.reshape(-1) for part in whole.split(heights, 1)])
    back = torch.empty_like(sent)
    torch.distributed.all_to_all_single(back, got, to_owners, from_all, group=process_group)
    results: list[Tensor] = [back] * len(updates)
    for mine, part in zip(owned, back.split(to_owners), strict=True):
        for i, one in zip(mine, part.view(len(mine), heights[rank], cols), strict=True):
            results[i] = one
    return results


def _gathered(params: Sequence[Any], updates: Sequence[Tensor], orthogonal: Orthogonal) -> list[Tensor]:
    """Every process gathers and computes all matrices, and keeps its shards."""
    from torch.distributed.tensor import DTensor, Replicate

    results = []
    for p, update in zip(params, updates, strict=True):
        mesh, places = p.device_mesh, p.placements
        whole = DTensor.from_local(update, mesh, places, shape=p.shape, stride=p.stride(), run_check=False)
        x = whole.redistribute(placements=[Replicate()] * mesh.ndim).to_local().contiguous()
        full = orthogonal(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
        replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        results.append(replicated.redistribute(placements=places).to_local())
    return results
