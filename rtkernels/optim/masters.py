"""Master weights of parameters that somebody else has written since the last step, as by loading a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.optim.moments import own

Mark = tuple[int, int, int]


def mark(p: Any) -> Mark:
    """Return what changes when a parameter is written in place or gets other memory."""
    mine = own(p)
    return mine.data_ptr(), *(0 if t.is_inference() else t._version for t in (p, mine))


def take_over_(master: Tensor, p: Any) -> None:
    """Set master weights to the elements of a parameter that are not their rounded values.

    The others keep their low bits. Waits for the device only if the master weights are in host memory.
    """
    kept, mine = own(master), own(p)
    here = kept.to(mine.device)
    kept.copy_(torch.where(mine == here.to(mine.dtype), here, mine.float()))
