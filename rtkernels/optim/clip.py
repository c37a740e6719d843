"""Gradient clipping by norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.multi.multi_tensor import multi_clip_norm_, multi_norm, norm_over_groups, scale_to_norm_
from rtkernels.runtime.operator.sharding import is_sharded, local


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: Any = None,
) -> Tensor:
    """Scale the gradients of all parameters so that their total norm is at most `max_norm`.

    Like ``torch.nn.utils.clip_grad_norm_``, but in three launches and without waiting for the device. If the norm is
    small enough already, the gradients are not written.

    Args:
        parameters: Parameters; their ``.grad`` tensors are changed in place, and parameters without one are skipped.
            Gradients are bfloat16, float16 or float32, also mixed, on one device, each contiguous or a permutation of a
            contiguous tensor. For DTensors (FSDP2, tensor parallelism) the norm is that of the whole tensors: an
            all-reduce over each sharded mesh dimension adds the squares of the shards, so all processes of the meshes
            must call this function.
        max_norm: The largest allowed norm, at least 0.
        norm_type: Order of the norm: 2, 1 or ``math.inf``.
        error_if_nonfinite: Raise an error if the norm is NaN or infinite, before anything is changed. Waits for the
            device.
        group: A process group over which plain gradients are sharded; the norm is over all its members. Not needed for
            DTensors, whose mesh is known.

    Returns:
        The norm before clipping, 0-d fp32; a plain tensor, also for DTensors.

    Raises:
        ArgumentError: The gradients are not supported together, or `max_norm` or `norm_type` is not one of these.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    grads = [p.grad for p in parameters if p.grad is not None]
    sharded = any(is_sharded(g) for g in grads)
    norm = None
    if error_if_nonfinite or sharded:
        norm = _norm_of_shards(grads, norm_type, group) if sharded else multi_norm(grads, norm_type, group=group)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}; pass error_if_nonfinite=False to "
            "scale by it anyway"
        )
    with torch.no_grad():
        if not sharded:
            return multi_clip_norm_(grads, max_norm, norm_type, group=group)
        scale_to_norm_([local(g) for g in grads], norm, max_norm)
    return norm


@torch.no_grad()
def _norm_of_shards(grads: list[Any], ord: float, group: Any) -> Tensor:
    """Return the norm of gradients, some of which are DTensors."""
    shards: dict[Any, list[Tensor]] = {}  # by the process groups over which they are split
    for grad in grads:
        groups = () if group is None else (group,)
        if is_sharded(grad):
            if any(placement.is_partial() for placement in grad.placements):  # partial sums are not shards
                from torch.distributed.tensor import Replicate

                whole = [Replicate() if one.is_partial() else one for one in grad.placements]
                grad = grad.redistribute(placements=whole)
            mesh = grad.device_mesh
            groups = tuple(mesh.get_group(dim) for dim, one in enumerate(grad.placements) if one.is_shard())
        shards.setdefault(groups, []).append(local(grad))
    return norm_over_groups(list(shards.items()), ord)
