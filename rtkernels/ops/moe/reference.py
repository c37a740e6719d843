"""Moving rows between tokens and experts in plain torch: what runs for CPU tensors, and what kernels are tested by."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.runtime.layout import nothing


def kept(rows: Tensor, count: int) -> Tensor:
    """Return which choices have a row."""
    return (rows >= 0) & (rows < count)


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``x[rows]``, with zeros for rows that x does not have."""
    if len(x) == 0:
        return x.new_zeros((*rows.shape, *x.shape[1:]))
    bits = x if x.itemsize > 1 else x.view(torch.uint8)
    found = bits[rows.clamp(0, len(x) - 1).long()]
    mask = kept(rows, len(x)).view(*rows.shape, *(1,) * (x.dim() - 1))
    return torch.where(mask, found, torch.zeros((), dtype=found.dtype, device=x.device)).view(x.dtype)


def chosen(probs: Tensor, experts: Tensor | None) -> Tensor:
    """Return the probabilities of the choices, ``[tokens, top_k]``."""
    if experts is None:
        return probs
    if probs.shape[1] == 0:
        return probs.new_zeros(experts.shape)
    return torch.where(kept(experts, probs.shape[1]), probs.gather(1, experts.clamp(0, probs.shape[1] - 1).long()), 0)


def _spread(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return ``[count, ...]`` with ``values[t, j]`` at ``rows[t, j]`` and zeros elsewhere."""
    bits = values if values.itemsize > 1 else values.view(torch.uint8)
    out = bits.new_zeros((count, *values.shape[2:]))
    there = kept(rows, count)
    out[rows[there].long()] = bits[there]
    return out.view(values.dtype)


def permute(
    x: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None, probs: Tensor | None, experts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    count, top_k = slots.shape[0], rows.shape[1]

    def each(t: Tensor) -> Tensor:
        return _spread(t[:, None].expand(t.shape[0], top_k, *t.shape[1:]), rows, count)

    return (
        each(x),
        nothing(x) if scale is None else each(scale),
        nothing(x) if probs is None else _spread(chosen(probs, experts), rows, count),
    )


def unpermute(
    y: Tensor, rows: Tensor, probs: Tensor | None, experts: Tensor | None, carried: Tensor | None
) -> tuple[Tensor, Tensor]:
    weights = None if probs is None else chosen(probs, experts).float()
    total = torch.zeros(rows.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(rows.shape[1]):
        term = gathered(y, rows[:, j]).float()
        if weights is not None:
            term = torch.where(kept(rows[:, j], len(y))[:, None], term * weights[:, j, None], 0)
        total += term
    return total.to(y.dtype), nothing(y) if carried is None else gathered(carried, rows)


def backward(
    dout: Tensor, y: Tensor | None, rows: Tensor, slots: Tensor, probs: Tensor, experts: Tensor | None, need_y: bool
) -> tuple[Tensor, Tensor]:
    count, (tokens, top_k) = slots.shape[0], rows.shape
    weights = chosen(probs, experts).float()
    dy, dprobs = nothing(dout), nothing(dout)
    if need_y:
        dy = dout.new_zeros(count, dout.shape[1])
        for j in range(top_k):
            there = kept(rows[:, j], count)
            dy[rows[there, j].long()] = (dout.float() * weights[:, j, None]).to(dout.dtype)[there]
    if y is not None:
        columns = [(dout.float() * gathered(y, rows[:, j]).float()).sum(-1) for j in range(top_k)]
        all_dprobs = torch.stack(columns, 1) if top_k else dout.new_zeros(tokens, 0, dtype=torch.float32)
        dprobs = torch.where(kept(rows, count), all_dprobs, 0).to(probs.dtype)
    return dy, dprobs


def probs_of(values: Tensor, rows: Tensor | None, experts: Tensor | None, columns: int) -> Tensor:
    numbers = values if rows is None else gathered(values, rows)
    if experts is None:
        return numbers.clone()
    out = torch.zeros(experts.shape[0], columns, dtype=torch.float32, device=values.device)
    lines = torch.arange(experts.shape[0], dtype=torch.int64, device=values.device)
    for j in range(experts.shape[1]):
        there = kept(experts[:, j], columns)
        out[lines[there], experts[there, j].long()] += numbers[there, j].float()
    return out.to(values.dtype)
