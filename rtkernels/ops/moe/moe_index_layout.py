"""Where each routed token goes: the index that permutation, its backward and the expert GEMMs share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MoeIndex(NamedTuple):
    """The rows of T tokens with up to k experts each, sorted by expert and within an expert by token.

    Every expert's rows start at a multiple of the padding; the rows between an expert's last token and the next
    expert's first row, and the rows after the last expert, are pad rows.

    Attributes:
        rows: ``[T, k]`` int32, the row of each choice, -1 if the choice was dropped.
        experts: ``[T, k]`` int32, the expert of each choice, -1 if the choice was dropped.
        slots: ``[R]`` int32, the choice ``t * k + j`` that fills each row, -1 in pad rows.
        counts: ``[E]`` int32, the number of tokens of each expert that have a row.
        offsets: ``[E + 1]`` int32, the first row of each expert; the last entry is the number of used rows. Its
            differences are the padded counts; ``torch._grouped_mm`` takes ``offsets[1:]``.
        dropped: ``[]`` int32, the number of choices that were dropped for lack of rows or because their expert does not
            exist. Choices of -1 are not counted.
    """

    rows: Tensor
    experts: Tensor
    slots: Tensor
    counts: Tensor
    offsets: Tensor
    dropped: Tensor


def max_rows(tokens: int, top_k: int, experts: int, multiple_of: int = 1) -> int:
    """Return the most rows, pad rows included, that `tokens` tokens with `top_k` choices among `experts` can need."""
    choices = tokens * min(top_k, experts)
    padded = choices + min(experts, choices) * (multiple_of - 1)
    return padded // multiple_of * multiple_of


def build(choices: Tensor, experts: int, multiple_of: int, rows: int) -> MoeIndex:
    """Build the index from ``[T, k]`` expert numbers in plain torch, into `rows` rows."""
    tokens, top_k = choices.shape
    flat = choices.reshape(-1).long()
    valid = (flat >= 0) & (flat < experts)
    key = torch.where(valid, flat, experts)
    order = torch.argsort(key, stable=True)  # by expert, then by token
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    padded = (counts + multiple_of - 1) // multiple_of * multiple_of
    first = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    before = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sorted_key = key[order]
    rank = torch.arange(len(flat), dtype=torch.int64, device=flat.device) - before[sorted_key.clamp(max=experts)]
    row = first[sorted_key.clamp(max=experts)] + rank
    kept = (sorted_key < experts) & (row < rows)
    row_of = torch.full_like(flat, -1)
    row_of[order] = torch.where(kept, row, -1)
    slots = flat.new_full((rows,), -1)
    slots[row[kept]] = order[kept]
    expert_of = torch.where(row_of >= 0, flat, -1)
    offsets = first.clamp(max=rows)
    kept_counts = torch.minimum(counts, offsets.diff())
    lost = ((flat != -1) & (row_of < 0)).sum()
    as_int = [t.to(torch.int32) for t in (row_of.view(tokens, top_k), expert_of.view(tokens, top_k), slots)]
    return MoeIndex(*as_int, kept_counts.to(torch.int32), offsets.to(torch.int32), lost.to(torch.int32))
