"""Gradients of attention whose few heads of keys would leave most SMs idle: blocks share the query heads of a group.

For kernels that do not split these heads themselves (``sm90_backward_order.py``).

A block owns a tile of keys and loops over the queries of all heads that share them. Where there are fewer such tiles
than SMs, k and v are repeated, so that a head of keys serves fewer query heads; the gradients of the copies are summed
in fp32. They are rounded once more than without it, as they are where heads are expanded beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.attention.problem import Attention

_KEYS, _QUERIES = 128, 64  # of a tile
_ENOUGH_STEPS = 24  # of a block: below, copies and sums take as long as what they save
_ROUNDS = 2  # blocks per SM that are aimed at
_TENSORS = slice(2, 5)  # q, k and v among the arguments of the operator


def copies_of_heads(problem: Attention, sm_count: int) -> int:
    """Return how often each head of keys is repeated for a backward pass; 1 if that gains nothing."""
    blocks = -(-problem.lkv // _KEYS) * problem.heads_kv * problem.batch
    steps = -(-problem.lq // _QUERIES) * problem.group
    if problem.group == 1 or blocks >= sm_count or steps < _ENOUGH_STEPS or not {"k", "v"} & {*problem.wants}:
        return 1
    divisors = [n for n in range(2, problem.group + 1) if problem.group % n == 0]
    return next((n for n in divisors if blocks * n >= _ROUNDS * sm_count), problem.group)


def backward_of_copies(launch: Callable[..., tuple[Tensor, ...]], copies: int, *args: Any) -> tuple[Tensor, ...]:
    """Run a backward pass with repeated heads of keys.

    Args:
        launch: The operator's own.
        copies: How often each head is repeated.
        args: The arguments of the operator; q, k and v from the third on, and as the last five which gradients are
            needed.
    """
    q, k, v = args[_TENSORS]
    repeated = [t.repeat_interleave(copies, -2) for t in (k, v)]
    dq, dk, dv, *others = launch(*args[:2], q, *repeated, *args[5:])
    _, need_k, need_v, *_ = args[-5:]
    return dq, _summed(dk, k, copies) if need_k else dk, _summed(dv, v, copies) if need_v else dv, *others


def _summed(gradient: Tensor, like: Tensor, copies: int) -> Tensor:
    """Return the sum over the copies of each head, in the layout of the operator's results."""
    shape, steps = (*like.shape[:-2], like.shape[-2], copies, like.shape[-1]), gradient.stride()
    parts = gradient.as_strided(shape, (*steps[:-2], copies * steps[-2], steps[-2], steps[-1]))
    if gradient.is_contiguous():
        return parts.sum(-2)
    order = (0, 2, 1, 3)  # [batch, heads, length, width] in memory
    dense = torch.empty([like.shape[i] for i in order], dtype=like.dtype, device=like.device)
    return torch.sum(parts, -2, out=dense.permute(order))
