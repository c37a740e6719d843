"""Log-probabilities over a vocabulary that is split between the processes of a group: what they exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtkernels.ops.loss.cross_entropy_parallel import gathered


def all_parts(parts: Tensor, targets: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the parts ``[n, 6, rows]`` and scores of ids ``[n, k, rows]`` of all processes, in the order of ranks."""
    if group is None:
        return parts.unsqueeze(0), targets.unsqueeze(0)
    every = gathered(torch.cat((parts, targets)), group)
    return every[:, : len(parts)].contiguous(), every[:, len(parts) :].contiguous()


def complete(dhidden: Tensor, dtype: torch.dtype, group: Any) -> Tensor:
    """Return the sum of the fp32 gradients of hidden states of all processes, rounded once."""
    if group is not None:
        dist.all_reduce(dhidden, group=group)
    return dhidden.to(dtype)
