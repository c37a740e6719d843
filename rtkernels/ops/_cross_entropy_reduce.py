"""Sums over the rows of cross entropy: the loss, the accuracy, and how many rows count."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels._layout import address, nothing
from rtkernels.ops._cross_entropy_plans import MEAN, NONE, REDUCE_PLANS, reduce_blocks


def floats(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised fp32 tensor on the device of another one."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def parts_of(rows: int, like: Tensor) -> Tensor | None:
    """Return what several blocks of a reduction leave for the last one; None if one is enough."""
    blocks = reduce_blocks(rows)
    return None if blocks == 1 else torch.zeros(3 * blocks + 1, dtype=torch.float32, device=like.device)


def reduce_rows(
    losses: Tensor, correct: Tensor | None, labels: Tensor, ignore_index: int, reduction: int, parts, count
):
    """Return loss, accuracy and ``1 / rows that count`` (if `count`) from the numbers of the rows."""
    loss, accuracy = floats(losses), nothing(losses) if correct is None else floats(losses)
    factor = floats(losses, 1) if count else None
    rows = losses.numel()
    if rows == 0:  # its address is null, which means something else to the kernel
        return loss.zero_(), accuracy.zero_(), None if factor is None else factor.zero_()
    launch = REDUCE_PLANS[losses.get_device(), True, reduce_blocks(rows)]
    launch(
        losses.data_ptr(), address(correct), labels.data_ptr(), loss.data_ptr(), accuracy.data_ptr(), address(factor),
        address(parts), rows, int(labels.dtype == torch.int64), ignore_index, int(reduction == MEAN),
    )  # fmt: skip
    return loss, accuracy, factor


def count_rows(labels: Tensor, ignore_index: int) -> Tensor:
    """Return ``1 / rows that count``, ``[1]``."""
    blocks, parts = reduce_blocks(labels.numel()), None
    if blocks == 1:
        factor = floats(labels, 1)
    else:  # in one piece of memory: kernels that start early must not get what this one still needs
        parts = torch.zeros(3 * blocks + 2, dtype=torch.float32, device=labels.device)
        factor, parts = parts[-1:], parts[:-1]
    launch = REDUCE_PLANS[labels.get_device(), False, blocks]
    wide = int(labels.dtype == torch.int64)
    launch(0, 0, labels.data_ptr(), 0, 0, factor.data_ptr(), address(parts), labels.numel(), wide, ignore_index, 1)
    return factor


def results_of(losses: Tensor, correct: Tensor | None, labels: Tensor, ignore_index: int, reduction: int, parts, count):
    """As `reduce_rows`, or the numbers of the rows themselves without a reduction; empty tensors for None."""
    if reduction == NONE:
        shape = labels.shape
        return losses.view(shape), nothing(losses) if correct is None else correct.view(shape), nothing(losses)
    loss, accuracy, factor = reduce_rows(losses, correct, labels, ignore_index, reduction, parts, count)
    return loss, accuracy, nothing(losses) if factor is None else factor
