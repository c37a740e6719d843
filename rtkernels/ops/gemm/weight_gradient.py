"""The gradient of a weight, added to an fp32 sum that starts the accumulators: level 3 of batch invariance.

Rows are added in order, so the bits do not depend on how a batch is cut into calls at multiples of ``BLOCK_ROWS``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.gemm.grouped_mm import WGRAD
from rtkernels.ops.gemm.scaled_mm import IN_PLACE
from rtkernels.ops.shared.block_sum import BLOCK_ROWS

_OPTIONS = ("none", "kn", None, None, None, "auto", "auto", True)  # recipe to accumulate of scaled_mm
_STEP = 16  # rows of one instruction of the tensor cores
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


class TokenBlocks:
    """Where the rows of experts lie if every block of 128 tokens begins at a multiple of 16 rows of an expert.

    Tensor cores multiply 16 rows at a time, and rows of zeros add nothing. So sums over the rows of an expert do not
    depend on where a batch is cut, at multiples of 128 tokens.

    Args:
        tokens: ``[rows]``: the token of each row; rows of an expert are in the order of tokens. Negative: padding.
        ends: ``[experts]``: the row after the last one of each expert.
        count: How many tokens there are.
    """

    def __init__(self, tokens: Tensor, ends: Tensor, count: int) -> None:
        rows, experts, blocks = len(tokens), len(ends), max(-(-count // BLOCK_ROWS), 1)
        row = torch.arange(rows, dtype=torch.int64, device=tokens.device)
        expert = torch.searchsorted(ends.long(), row, right=True)
        valid = (expert < experts) & (tokens >= 0)
        self._rows, self._experts = rows + (_STEP - 1) * min(experts * blocks, rows), experts
        key = torch.where(valid, expert * blocks + tokens // BLOCK_ROWS, experts * blocks)
        counts = torch.zeros(experts * blocks + 1, dtype=torch.int64, device=tokens.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        # Rows of padding are behind those of an expert's tokens.
        lowest = torch.full_like(counts, rows).scatter_reduce_(0, key, row, "amin")
        rank = row - lowest[key]
        padded = (counts[:-1] + _STEP - 1) // _STEP * _STEP
        first = torch.cat([torch.zeros_like(padded[:1]), padded.cumsum(0)])
        self._places = torch.where(valid, first[key] + rank, self._rows)
        self._ends = first[1:].view(experts, blocks)[:, -1].int()

    def _padded(self, t: Tensor) -> Tensor:
        result = torch.zeros(self._rows + 1, t.shape[1], dtype=t.dtype, device=t.device)
        return result.index_copy_(0, self._places, t)

    def add_products_(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add ``dy_e.t() @ x_e`` of every expert e to fp32 ``[experts, n, k]``, block after block of tokens."""
        left, right = self._padded(dy).t(), self._padded(x).t()
        WGRAD.call(total, left, right, None, None, self._ends, _STEP, True, "auto", "auto", "auto")


def _block(t: Tensor, first: int) -> Tensor:
    rows = t[first : first + BLOCK_ROWS]
    block = torch.zeros(BLOCK_ROWS, t.shape[1], dtype=t.dtype, device=t.device)
    block[: rows.shape[0]] = rows
    return block
