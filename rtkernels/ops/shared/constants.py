"""Numbers as tensors that a device makes itself: a copy from the host synchronises, and no CUDA graph can hold it."""

from __future__ import annotations

import torch
from torch import Tensor


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as ``torch.tensor(value)`` does, rounded once; one too large for the dtype is infinite."""
    if dtype.is_floating_point:
        return torch.full((), value, dtype=torch.float64, device=device).to(dtype)
    return torch.full((), value, dtype=dtype, device=device)
