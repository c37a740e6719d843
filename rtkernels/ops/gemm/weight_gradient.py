"""The gradient of a weight, added to an fp32 sum that starts the accumulators: level 3 of batch invariance.

Rows are added in order, so the bits do not depend on how a batch is cut into calls at multiples of ``BLOCK_ROWS``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.gemm.scaled_mm import IN_PLACE
from rtkernels.ops.shared.block_sum import BLOCK_ROWS

_OPTIONS = ("none", "kn", None, None, None, "auto", "auto", True)  # recipe to accumulate of scaled_mm
_HALVES = (torch.bfloat16, torch.float16)


def add_product_(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add ``dy.t() @ x`` of ``dy [rows, n]`` and ``x [rows, k]``, in one dtype, to fp32 ``[n, k]``."""
    if dy.shape[0] == 0:
        return
    if dy.dtype in _HALVES:
        IN_PLACE.call(total, dy.t(), x, None, None, None, None, None, *_OPTIONS)
        return
    for first in range(0, dy.shape[0], BLOCK_ROWS):  # cuBLAS chooses by sizes, so all blocks have the same
        left, right = (_block(t, first) for t in (dy, x))
        total += torch.mm(left.t(), right).to(torch.float32)


def _block(t: Tensor, first: int) -> Tensor:
    rows = t[first : first + BLOCK_ROWS]
    block = torch.zeros(BLOCK_ROWS, t.shape[1], dtype=t.dtype, device=t.device)
    block[: rows.shape[0]] = rows
    return block
