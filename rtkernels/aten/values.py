"""Values that the host looks at: indices that torch's CPU kernels refuse. On a CUDA device nothing is read."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def any_outside(index: Tensor, begin: int, end: int, besides: int | None = None) -> bool:
    """Return whether a host tensor has an index that is neither in ``[begin, end)`` nor `besides`.

    A trace does not see the comparison: its answer decides whether the handler goes on, not what it computes.
    """
    if index.is_cuda:
        return False
    with _disable_current_modes():
        wrong = (index < begin) | (index >= end)
        return bool((wrong if besides is None else wrong & (index != besides)).any())
