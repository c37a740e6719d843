"""Cross entropy over a vocabulary that is split between the processes of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import reference
from rtkernels.ops.loss.cross_entropy_operators import BACKWARD, BACKWARD_IN_PLACE, PARTS
from rtkernels.runtime.operator.autograd import once_differentiable


def vocabulary_range(cols: int, group: Any, first: int | None, size: int | None) -> tuple[int, int]:
    """Return the first column of this process and the size of the whole vocabulary: equal parts unless given."""
    if (first is None) != (size is None):
        raise ArgumentError("vocab_start and vocab_size go together; expected both or neither")
    if first is None or size is None:
        return dist.get_rank(group) * cols, dist.get_world_size(group) * cols
    if not 0 <= first <= size - cols:
        raise ArgumentError(
            f"vocab_start is {first} and vocab_size {size}; expected {cols} columns from vocab_start to fit in"
        )
    return first, size


def gathered(parts: Tensor, group: Any) -> Tensor:
    """Return ``[processes, 5, rows]`` in the order of the ranks: the only communication."""
    out = parts.new_empty(dist.get_world_size(group), *parts.shape)
    if out.numel():  # every process has as many rows
        dist.all_gather_into_tensor(out.view(-1, parts.shape[-1]), parts, group=group)
    return out


def combined(
    every: Tensor, labels: Tensor, ignore_index: int, smoothing: float, z_loss: float, vocabulary: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, accuracy, stats and factor as ``cross_entropy_fwd`` does, from the parts of all processes."""
    tops, levels, targets, totals, hits = every.unbind(1)
    top = tops.amax(0)
    level = (levels + (tops - top)).exp().sum(0).log()
    losses = reference.row_losses(top, level, targets.amax(0), totals.sum(0), smoothing, z_loss, vocabulary)
    flat = labels.reshape(-1)
    losses = torch.where((flat < 0) | (flat >= vocabulary), torch.nan, losses)
    losses = torch.where(flat == ignore_index, 0.0, losses)
    owner = (tops == top).to(torch.uint8).argmax(0, keepdim=True)  # the first one that has the largest score
    correct = torch.where(flat == ignore_index, 0.0, hits.gather(0, owner).squeeze(0))
    loss, factor = reference.reduced(losses, labels, ignore_index, reduction)
    accuracy, _ = reference.reduced(correct, labels, ignore_index, reduction)
    return loss, accuracy, torch.where(flat == ignore_index, 0.0, torch.stack((top, level))), factor


class ParallelCrossEntropy(torch.autograd.Function):
    """Gives loss, accuracy and log-sum-exp, the same on every process; the gradient of its own columns to each."""

    @staticmethod
    def forward(ctx, logits, labels, options, reduction, in_place, group, first, vocabulary):
        ignore_index, smoothing, z_loss, softcap = options
        ctx.set_materialize_grads(False)
        parts = PARTS(logits, labels, ignore_index, smoothing, softcap, first, vocabulary)
        loss, accuracy, stats, factor = combined(
            gathered(parts, group), labels, ignore_index, smoothing, z_loss, vocabulary, reduction
        )
        ctx.more = (*options, first, vocabulary)
        ctx.in_place, ctx.mean = in_place, reduction == 1
        ctx.save_for_backward(logits, labels, stats, factor)
        lse = stats.sum(0).view(labels.shape)
        ctx.mark_non_differentiable(accuracy, lse)
        return loss, accuracy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _accuracy, _lse):
        if dloss is None:
            return (None,) * 8
        logits, labels, stats, factor = ctx.saved_tensors
        more = (labels, stats, factor if ctx.mean else None, *ctx.more)
        if ctx.in_place:
            BACKWARD_IN_PLACE(dloss, logits, *more)
            return logits.detach(), *(None,) * 7
        return BACKWARD(dloss, logits, *more), *(None,) * 7
