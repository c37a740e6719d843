"""Statistics of rows of logits in plain torch: what CPU tensors get, with the rules of the kernels of `logprob.cu`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError

TOP, SUM, SHIFTED, SQUARES, TOTAL, BEFORE = range(6)  # rows of parts
PARTS = 6
CONSTANT, SLOPE, TERMS = 2, 3, 6  # rows of terms, and how many there are


class Scores(NamedTuple):
    """How logits become scores: ``softcap * tanh(logit_scale * x / softcap) / temperature``.

    Attributes:
        logit_scale: Factor of the logits.
        softcap: Their limit, or 0.
        temperature: Of all rows, where `temperatures` is None.
        temperatures: fp32 ``[rows]``, or None.
    """

    logit_scale: float
    softcap: float
    temperature: float
    temperatures: Tensor | None

    def divisor(self) -> Tensor | float:
        """Return the temperature, as a column if rows have their own."""
        return self.temperature if self.temperatures is None else self.temperatures.reshape(-1, 1)

    def capped(self, logits: Tensor) -> Tensor:
        """Return the scores before the division by the temperature."""
        a = logits.float() * self.logit_scale
        return self.softcap * torch.tanh(a / self.softcap) if self.softcap else a


def check_ids(ids: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raise an ArgumentError for an id outside the vocabulary."""
    bad = ((ids < 0) | (ids >= vocabulary)) & (ids != ignore_index)
    if bad.any():
        place = int(bad.flatten().to(torch.uint8).argmax())
        raise ArgumentError(
            f"ids has {int(ids.flatten()[place])} in place {place} of the flattened ids, which is neither a column of "
            f"the vocabulary nor ignore_index (on a GPU this is about an earlier call)"
        )


def folded(parts: Tensor) -> Tensor:
    """Return the parts ``[6, rows]`` of the union of columns, from those ``[n, 6, rows]`` of n sets of columns."""
    tops, sums, shifted, squares, totals, before = parts.unbind(1)
    top = tops.amax(0)
    rise = torch.where(tops == -torch.inf, torch.inf, top - tops)
    none = rise == torch.inf
    factor = torch.where(none, 0.0, (-rise).exp())
    shifted = factor * (shifted - torch.where(none, 0.0, rise) * sums)
    sums, squares = factor * sums, factor.square() * squares
    return torch.stack((top, sums.sum(0), shifted.sum(0), squares.sum(0), totals.sum(0), before.amax(0)))


def parts(
    logits: Tensor, ids: Tensor, scores: Scores, ignore_index: int, first: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return the parts ``[6, rows]`` of some columns, and the scores ``[k, rows]`` of ids (-inf if not among them).

    `ids`: ``[rows, k]``.
    """
    check_ids(ids, ignore_index, vocabulary)
    rows, cols = logits.shape
    column = ids.long() - first
    here = (column >= 0) & (column < cols) & (ids != ignore_index)
    if rows == 0:
        return tuple(logits.new_empty(n, 0, dtype=torch.float32) for n in (PARTS, ids.shape[1]))
    z = scores.capped(logits) / scores.divisor()
    top = torch.where(z.isnan(), -torch.inf, z).amax(-1)
    away = z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1)
    power = away.exp()
    targets = z.gather(-1, torch.where(here, column, 0)).masked_fill(~here, -torch.inf)
    earlier = torch.arange(cols, dtype=torch.int64, device=z.device) < column[:, :1]
    before = torch.where(earlier & ~z.isnan(), z, -torch.inf).amax(-1)
    shifted = (power * torch.where(away < -1000.0, -1000.0, away)).sum(-1)
    found = top, power.sum(-1), shifted, power.square().sum(-1), z.sum(-1), before
    return torch.stack(found), targets.t().contiguous()


class Statistics(NamedTuple):
    """Results for rows ``[rows]``, logprob ``[rows, k]``; 0 where ignored. stats: top and level ``[2, rows]``."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    log_sum_sq: Tensor
    mean_logit: Tensor
    top1: Tensor
    stats: Tensor


def finished(parts: Tensor, targets: Tensor, ids: Tensor, ignore_index: int, vocabulary: int) -> Statistics:
    """Return the results from the parts ``[n, 6, rows]`` and targets ``[n, k, rows]`` of all columns."""
    top, total, shifted, squares, scores, before = folded(parts).unbind()
    rows = top.shape[0]
    flat = ids.reshape(rows, targets.shape[1])
    ignored = flat == ignore_index
    dropped = ignored.all(-1)
    target = targets.amax(0)
    level = total.log()
    logprob = (target - top - level).t()
    logprob = torch.where((flat < 0) | (flat >= vocabulary), torch.nan, logprob).masked_fill(ignored, 0.0)
    top1 = (target[0] >= top) & (target[0] > before) & ~ignored[:, 0]
    of_rows = (level - shifted / total, top + level, squares.log() - 2 * level, scores / vocabulary)
    return Statistics(
        logprob.contiguous(),
        *(t.masked_fill(dropped, 0.0) for t in of_rows),
        top1,
        torch.stack((top, level)).masked_fill(dropped, 0.0),
    )


class Incoming(NamedTuple):
    """Gradients of the results; None for those without one."""

    logprob: Tensor | None  # [rows, k]
    entropy: Tensor | None
    lse: Tensor | None
    log_sum_sq: Tensor | None
    mean_logit: Tensor | None


def terms(
    ids: Tensor, incoming: Incoming, stats: Tensor, entropy: Tensor | None, log_sum_sq: Tensor | None,
    ignore_index: int, vocabulary: int,
) -> Tensor:  # fmt: skip
    """Return ``[6, rows]``: top and level, then what the gradient of each row is made of.

    In a score it is ``p * (constant + slope * log p + square * p) + offset``. Ignored rows: a level of inf, else 0.
    `ids`: ``[rows, k]``.
    """
    zero = torch.zeros(len(ids), dtype=torch.float32, device=ids.device)
    d_entropy, d_lse, d_squares, d_mean = (zero if g is None else g.float().reshape(-1) for g in incoming[1:])
    constant = d_lse - of_ids(incoming.logprob, ids, ignore_index, vocabulary).sum(-1) - 2 * d_squares
    if incoming.entropy is not None:
        constant = constant - d_entropy * entropy.reshape(-1)
    square = zero if incoming.log_sum_sq is None else 2 * d_squares * (-log_sum_sq.reshape(-1)).exp()
    found = torch.stack((constant, -d_entropy, square, d_mean / vocabulary))
    ignored = (ids == ignore_index).all(-1)
    level = stats[1].masked_fill(ignored, torch.inf)
    return torch.cat((stats[:1], level.unsqueeze(0), found.masked_fill(ignored, 0.0)))


def of_ids(dlogprob: Tensor | None, ids: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """Return the gradients of log-probabilities ``[rows, k]``, 0 where an id is ignored or bad."""
    if dlogprob is None:
        return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    return torch.where(
        (ids != ignore_index) & (ids >= 0) & (ids < vocabulary), dlogprob.float().reshape(ids.shape), 0.0
    )


def gradient(
    logits: Tensor, ids: Tensor, terms: Tensor, dlogprob: Tensor | None, scores: Scores, ignore_index: int, first: int,
    vocabulary: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the gradient of some columns of logits, rounded once."""
    cols = logits.shape[1]
    capped, divisor = scores.capped(logits), scores.divisor()
    top, level, constant, slope, square, offset = (t.unsqueeze(-1) for t in terms)
    logp = capped / divisor - torch.where(top == -torch.inf, 0.0, top) - level
    p = logp.exp()
    d = torch.where(p == 0, 0.0, p * (constant + slope * logp + square * p)) + offset
    column = ids.long() - first
    here = (column >= 0) & (column < cols) & (ids != ignore_index)
    each = of_ids(dlogprob, ids, ignore_index, vocabulary)
    d.scatter_add_(-1, torch.where(here, column, 0), torch.where(here, each, 0.0))
    d = d * (scores.logit_scale / divisor)
    if scores.softcap:
        d = d * (1 - (capped / scores.softcap).square())
    return d.masked_fill(level == torch.inf, 0.0).to(dtype)
