"""Gradients of ``sparse_mla`` by products of some tokens at a time; latents add up in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.index.embedding import ADD, NO_PADDING

_ELEMENTS = 2**26  # of the gathered latents of some tokens


def gradients(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, kv: Tensor, indices: Tensor, positions: Tensor | None,
    sinks: Tensor | None, lse: Tensor, value_width: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, kv and sinks. Arithmetic is fp32.

    Gradients of latents are rows that the gradient of an embedding adds by key, without atomics.
    """
    tokens, width, keys, count = q.shape[0], q.shape[2], kv.shape[0], indices.shape[1]
    dq, dsinks = torch.zeros_like(q, memory_format=torch.contiguous_format), None
    total = torch.zeros((keys, width), dtype=torch.float32, device=kv.device)
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
    limit = torch.full((tokens, 1), keys - 1, dtype=torch.int64, device=q.device)
    if positions is not None:
        limit = limit.minimum(positions.unsqueeze(1).long())
    step, source = max(_ELEMENTS // max(count * width, 1), 1), kv if keys else kv.new_zeros(1, width)
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        counts = (indices[part] >= 0) & (indices[part] <= limit[part])
        ids = torch.where(counts, indices[part], -1)
        # The row that stands for no key may be of a page that nothing was written to, and 0 times NaN is NaN.
        rows = source[ids.clamp(min=0).long()].float().masked_fill(~counts.unsqueeze(-1), 0.0)
        queries, values = q[part].float(), rows[..., :value_width]
        scores = scale * (queries @ rows.mT)
        finite = lse[part].clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)  # -inf where no key counts
        weights = torch.exp(scores - finite).masked_fill(~counts.unsqueeze(1), 0.0)
        incoming = queries.new_zeros(*queries.shape[:2], value_width) if dout is None else dout[part].float()
        dweights = incoming @ values.mT
        mean = (weights * dweights).sum(-1, keepdim=True)
        if dlse is not None:
            mean = mean - dlse[part].unsqueeze(-1)
        dscores = scale * weights * (dweights - mean)
        dq[part] = (dscores @ rows).to(q.dtype)
        drows = dscores.mT @ queries
        drows[..., :value_width] += weights.mT @ incoming
        if keys:
            ADD(total, drows.flatten(0, 1), ids.flatten(), 0, NO_PADDING)
        if sinks is not None:
            dsinks -= (torch.exp(sinks - finite.squeeze(-1)) * mean.squeeze(-1)).sum(0)
    return dq, total.to(kv.dtype), dsinks
