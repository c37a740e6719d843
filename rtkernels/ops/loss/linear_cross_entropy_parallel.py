"""The last linear layer and its cross entropy, with a vocabulary that is split between the processes of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtkernels.ops.loss import linear_cross_entropy_slabs as slabs
from rtkernels.ops.loss import reference
from rtkernels.ops.loss.cross_entropy_operators import BACKWARD_IN_PLACE, PARTS
from rtkernels.ops.loss.cross_entropy_parallel import combined, gathered
from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE
from rtkernels.ops.loss.linear_cross_entropy_operators import WeightSums, chunks, default_chunk_rows, scaled
from rtkernels.runtime.operator.autograd import once_differentiable


class _Gradients:
    """Gradients of hidden states, weight and bias, chunk by chunk of rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        self._hidden, self._weight = hidden, weight
        self._sums = WeightSums(weight, bias, True, *needs[1:])
        # Every process has the terms of its own columns: added in fp32, rounded one time.
        self.states = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None

    def add(self, part: slice, states: Tensor, dlogits: Tensor) -> None:
        self._sums.add(dlogits, states)
        if self.states is not None:
            slabs.add_product(self.states[part], dlogits, self._weight, True)

    def results(self, group: Any) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return those of states, complete on every process, of weight and of bias."""
        if self.states is not None:
            dist.all_reduce(self.states, group=group)
        return None if self.states is None else self.states.to(self._hidden.dtype), *self._sums.results()


class ParallelLinearCrossEntropy(torch.autograd.Function):
    """Gives loss, accuracy and log-sum-exp, the same on every process.

    The gradient of hidden states is complete on every process, that of weight and bias is of the process's own columns.
    All processes go through the same chunks of rows; one all-gather of 20 bytes per row for each, and one all-reduce of
    the gradient of hidden states.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, options, reduction, chunk_rows, group, first, vocabulary):
        ignore_index, smoothing, z_loss, softcap = options
        ctx.set_materialize_grads(False)
        ctx.needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        ctx.later = reduction == NONE  # gradients need that of every row's loss
        states, flat = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1)
        columns = -(-vocabulary // dist.get_world_size(group))  # the same number on all processes
        chunk_rows = chunk_rows or default_chunk_rows(len(states), weight.shape[1], columns, weight.element_size())
        gradients = None if ctx.later or not any(ctx.needs) else _Gradients(states, weight, bias, ctx.needs)
        factor = reference.reduced(states.new_zeros(0, dtype=torch.float32), flat, ignore_index, MEAN)[1]
        factor = factor if reduction == MEAN else torch.ones_like(factor)
        rows = []
        for part, some, logits in chunks(states, weight, bias, chunk_rows):
            parts = PARTS(logits, flat[part], ignore_index, smoothing, softcap, first, vocabulary)
            found = combined(
                gathered(parts, group), flat[part], ignore_index, smoothing, z_loss, vocabulary, NONE
            )[:3]  # fmt: skip
            rows.append(torch.cat([found[0][None], found[1][None], found[2]]))
            if gradients is not None:
                BACKWARD_IN_PLACE(factor, logits, flat[part], found[2], None, *options, first, vocabulary)
                gradients.add(part, some, logits)
        empty = torch.empty(4, 0, dtype=torch.float32, device=hidden.device)
        losses, hits, *stats = torch.cat(rows, 1) if rows else empty
        ctx.more = (options, chunk_rows, group, first, vocabulary)
        if ctx.later:
            ctx.save_for_backward(hidden, weight, labels, bias, torch.stack(stats))
        else:
            ctx.save_for_backward(*(gradients.results(group) if gradients is not None else ()))
            ctx.computed_gradient = True
        shaped = flat if reduction != NONE else labels
        loss = reference.reduced(losses.view(shaped.shape), shaped, ignore_index, reduction)[0]
        accuracy = reference.reduced(hits.view(shaped.shape), shaped, ignore_index, reduction)[0]
        lse = (stats[0] + stats[1]).view(labels.shape)
        ctx.mark_non_differentiable(accuracy, lse)
        ctx.shape = hidden.shape
        return loss, accuracy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _accuracy, _lse):
        if dloss is None:
            return (None,) * 10
        if ctx.later:
            options, chunk_rows, group, first, vocabulary = ctx.more
            hidden, weight, labels, bias, stats = ctx.saved_tensors
            states, flat, g = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1), dloss.reshape(-1)
            g = g.float()
            gradients = _Gradients(states, weight, bias, ctx.needs)
            for part, some, logits in chunks(states, weight, bias, chunk_rows):
                rows = (flat[part], stats[:, part].contiguous(), None)
                BACKWARD_IN_PLACE(g[part].contiguous(), logits, *rows, *options, first, vocabulary)
                gradients.add(part, some, logits)
            grads = gradients.results(group)
        else:
            grads = scaled(ctx.saved_tensors, ctx.needs, dloss)
        dhidden, dweight, dbias = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
        return None if dhidden is None else dhidden.view(ctx.shape), dweight, None, dbias, *(None,) * 6
