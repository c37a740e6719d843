"""Where equal ids begin and end in a sorted list."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator.into import into
from rtkernels.runtime.operator.replayed import replayed


@replayed
def id_bounds(ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return where each stretch of equal ids begins in a sorted list, and its length after the last one.

    ``bounds[i] .. bounds[i + 1]`` is the i-th stretch; entries behind the last stretch are ``len(ids)``, so that those
    that are smaller count the different ids. The host waits for nothing.

    Args:
        ids: int32 or int64, sorted; flattened.
        out: Takes the result instead of new memory: its shape, dtype and strides.

    Returns:
        int32 ``[ids.numel() + 1]``.
    """
    if out is not None:
        return into(id_bounds, locals())
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        what = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentError(f"ids is {str(what).removeprefix('torch.')}; expected a tensor of int32 or int64")
    flat = ids.reshape(-1)
    count = flat.numel()
    bounds = torch.full((count + 1,), count, dtype=torch.int32, device=ids.device)
    if count == 0:
        return bounds
    steps = torch.zeros(count, dtype=torch.bool, device=ids.device)
    torch.ne(flat[1:], flat[:-1], out=steps[1:])
    numbers = torch.arange(count, dtype=torch.int32, device=ids.device)
    return bounds.scatter_reduce_(0, steps.cumsum(0), numbers, "amin")  # the first number of each stretch
