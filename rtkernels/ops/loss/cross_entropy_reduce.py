"""Sums over the rows of cross entropy: the loss, the accuracy, and how many rows count."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE, REDUCE_PLANS, reduce_blocks
from rtkernels.runtime.launch.memory import fresh_zeros
from rtkernels.runtime.layout import address, nothing


def floats(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised fp32 tensor on the device of another one."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def reduce_rows(losses: Tensor, correct: Tensor | None, labels: Tensor, ignore_index: int, reduction: int, count):
    """Return loss, accuracy and ``1 / rows that count`` (if `count`) from the numbers of the rows."""
    loss, accuracy = floats(losses), nothing(losses) if correct is None else floats(losses)
    factor = floats(losses, 1) if count else None
    rows = losses.numel()
    if rows == 0:  # its address is null, which means something else to the kernel
        return loss.zero_(), accuracy.zero_(), None if factor is None else factor.zero_()
    _reduce(losses, correct, labels, loss, accuracy, factor, ignore_index, reduction, True)
    return loss, accuracy, factor


def count_rows(labels: Tensor, ignore_index: int) -> Tensor:
    """Return ``1 / rows that count``, ``[1]``."""
    factor = floats(labels, 1)
    _reduce(None, None, labels, None, None, factor, ignore_index, MEAN, False)
    return factor


def _reduce(losses, correct, labels, loss, accuracy, factor, ignore_index, reduction, overlap) -> None:
    device, rows = labels.get_device(), labels.numel()
    blocks = reduce_blocks(rows)
    # What several blocks leave for the last one. A counter and these numbers are in one piece of memory that nobody
    # gets again: kernels that start early must not get what this one still needs.
    parts = fresh_zeros(device, 3 * blocks + 1) if blocks > 1 else None
    REDUCE_PLANS[device, overlap, blocks](
        address(losses), address(correct), labels.data_ptr(), address(loss), address(accuracy), address(factor),
        address(parts), rows, int(labels.dtype == torch.int64), ignore_index, int(reduction == MEAN),
    )  # fmt: skip


def results_of(losses: Tensor, correct: Tensor | None, labels: Tensor, ignore_index: int, reduction: int, count):
    """As `reduce_rows`, or the numbers of the rows themselves without a reduction; empty tensors for None."""
    if reduction == NONE:
        shape = labels.shape
        return losses.view(shape), nothing(losses) if correct is None else correct.view(shape), nothing(losses)
    loss, accuracy, factor = reduce_rows(losses, correct, labels, ignore_index, reduction, count)
    return loss, accuracy, nothing(losses) if factor is None else factor
