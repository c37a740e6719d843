"""Cross entropy of DTensors: rows on several processes, a vocabulary on several processes, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator.sharding import is_sharded


def _own(t: Any, mesh: Any, places: Sequence[Any], grads: Sequence[Any] | None = None) -> Tensor:
    """Return this process's part of a tensor that is to lie so; a plain one is whole on every process."""
    from torch.distributed.tensor import DTensor, Replicate

    if not is_sharded(t):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return t.redistribute(mesh, places).to_local(grad_placements=grads)


def _vocabulary(shape: Any, mesh: Any, places: Sequence[Any], dim: int) -> dict[str, Any]:
    """Return the options of ``cross_entropy`` that say which columns of a vocabulary, dimension `dim`, are here."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    split = [i for i, place in enumerate(places) if place == Shard(dim)]
    if not split:
        return {}
    if len(split) > 1:
        raise ArgumentError(f"the vocabulary is split over {len(split)} dimensions of the mesh; expected one of them")
    _, offset = compute_local_shape_and_global_offset(shape, mesh, places)
    return {"group": mesh.get_group(split[0]), "vocab_start": int(offset[dim]), "vocab_size": int(shape[dim])}


def _reduced(
    results: Sequence[Tensor], mesh: Any, rows_at: list[Any], labels: Any, own_labels: Tensor, ignore_index: int,
    reduction: str,
) -> list[Any]:  # fmt: skip
    """Return DTensors of the results of rows, or of their sum or mean, given those of this process's rows."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if reduction == "none":
        shape = tuple(labels.shape)
        strides = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        return [DTensor.from_local(t, mesh, rows_at, run_check=False, shape=shape, stride=strides) for t in results]
    summed = [Partial() if isinstance(place, Shard) else Replicate() for place in rows_at]
    whole = [Replicate()] * mesh.ndim
    totals = [DTensor.from_local(t.sum(), mesh, summed, run_check=False).redistribute(mesh, whole) for t in results]
    if reduction == "sum":
        return totals
    count = (own_labels != ignore_index).sum().float()
    count = DTensor.from_local(count, mesh, summed, run_check=False).redistribute(mesh, whole).clamp(min=1.0)
    return [total / count for total in totals]


def cross_entropy_of_shards(function: Callable[..., Any], logits: Any, labels: Any, options: dict[str, Any]) -> Any:
    """Return ``function(logits, labels, **options)`` of logits that are a DTensor; results are DTensors.

    Logits may be sharded by rows and, over one dimension of the mesh, by columns; labels go where their rows are.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh, last = logits.device_mesh, logits.dim() - 1
    places = [place if isinstance(place, Shard) else Replicate() for place in logits.placements]
    rows_at = [Replicate() if place == Shard(last) else place for place in places]
    own_labels = _own(labels, mesh, rows_at)
    more = options | {"reduction": "none", "return_lse": True, "return_accuracy": True}
    more |= _vocabulary(logits.shape, mesh, places, last)
    loss, lse, hits = function(_own(logits, mesh, places), own_labels, **more)
    known = (mesh, rows_at, labels, own_labels, options["ignore_index"])
    loss, hits = _reduced([loss, hits], *known, options["reduction"])
    (lse,) = _reduced([lse], *known, "none")
    chosen = [loss, *((lse,) if options["return_lse"] else ()), *((hits,) if options["return_accuracy"] else ())]
    return chosen[0] if len(chosen) == 1 else tuple(chosen)


def placements_of_heads(hidden: Any, weight: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Return the mesh, and where hidden states, a head's weight and the weight's gradient are to lie on it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = (weight if is_sharded(weight) else hidden).device_mesh
    nowhere = [Replicate()] * mesh.ndim
    hidden_at, weight_at, weight_grad = [], [], []
    for of_hidden, of_weight in zip(
        getattr(hidden, "placements", nowhere), getattr(weight, "placements", nowhere), strict=True
    ):
        by_rows = isinstance(of_hidden, Shard) and of_hidden.dim != hidden.dim() - 1 and of_weight != Shard(0)
        hidden_at.append(of_hidden if by_rows else Replicate())
        weight_at.append(Shard(0) if of_weight == Shard(0) else Replicate())
        weight_grad.append(Partial() if by_rows else weight_at[-1])
    return mesh, hidden_at, weight_at, weight_grad


def linear_cross_entropy_of_shards(
    function: Callable[..., Any], hidden: Any, weight: Any, labels: Any, bias: Any, options: dict[str, Any]
) -> Any:
    """Return ``function(hidden, weight, labels, bias=bias, **options)`` where hidden or weight is a DTensor.

    Hidden states may be sharded by rows, the weight over one dimension of the mesh by its vocabulary: where a dimension
    of the mesh shards both, hidden states are gathered along it.
    """
    mesh, hidden_at, weight_at, weight_grad = placements_of_heads(hidden, weight)
    own_labels = _own(labels, mesh, hidden_at)
    reduction = "none" if options["reduction"] == "none" else "sum"
    more = options | {"reduction": reduction, "return_lse": True, "return_accuracy": True}
    more |= _vocabulary(weight.shape, mesh, weight_at, 0)
    own_bias = None if bias is None else _own(bias, mesh, weight_at, weight_grad)
    loss, lse, hits = function(
        _own(hidden, mesh, hidden_at), _own(weight, mesh, weight_at, weight_grad), own_labels, bias=own_bias, **more
    )
    known = (mesh, hidden_at, labels, own_labels, options["ignore_index"])
    loss, hits = _reduced([loss, hits], *known, options["reduction"])
    (lse,) = _reduced([lse], *known, "none")
    chosen = [loss, *((lse,) if options["return_lse"] else ()), *((hits,) if options["return_accuracy"] else ())]
    return chosen[0] if len(chosen) == 1 else tuple(chosen)
