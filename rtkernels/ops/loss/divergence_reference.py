"""The divergences in plain torch: what serves CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.loss.divergence_plan import LOGARITHM, MIXED, PROBABILITY, REVERSE, resolve
from rtkernels.ops.shared.constants import constant


def _mixed(x: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return what the prediction and the target add to each term of the Jensen-Shannon divergence."""
    high, gap = torch.maximum(x, t), -(x - t).abs()
    x_is_larger = x >= t
    rest = torch.where(x_is_larger, torch.full_like(x, beta), 1.0 - beta)
    level = torch.log1p(rest * gap.expm1())
    p, ratio = high.exp(), gap.exp()
    upper = torch.where(p == 0, 0.0, (1 - rest) * p * -level)
    lower = torch.where((p == 0) | (ratio == 0), 0.0, rest * p * ratio * (gap - level))
    return torch.where(x_is_larger, upper, lower), torch.where(x_is_larger, lower, upper)


def _terms(x: Tensor, t: Tensor, mode: int, beta: float) -> Tensor:
    if mode == REVERSE:
        return _terms(t, x, LOGARITHM, beta)
    if mode == MIXED:
        return sum(_mixed(x, t, beta))
    p, log_p = (t, t.log()) if mode == PROBABILITY else (t.exp(), t)
    return p * torch.where(p == 0, 0.0, log_p - x)


def _without_ignored(values: Tensor, labels: Tensor | None, ignore: int) -> Tensor:
    return values if labels is None else values.masked_fill((labels == ignore).unsqueeze(-1), 0.0)


def reference_each(x: Tensor, target: Tensor, labels: Tensor | None, ignore: int, mode: int, beta: float) -> Tensor:
    """Return every term, in x's dtype."""
    terms = _terms(x.float(), target.float(), mode, beta)
    return _without_ignored(terms, labels, ignore).to(x.dtype).contiguous()


def reference_fwd(
    x: Tensor, target: Tensor, labels: Tensor | None, ignore: int, mode: int, beta: float, factor: float, over: int
) -> Tensor:
    """Return the reduced loss, and what it was multiplied with, as fp32."""
    if x.numel() == 0:
        return torch.zeros(2, dtype=torch.float32, device=x.device)
    factor, divide = resolve(x.shape, over, factor)
    rows = _without_ignored(_terms(x.float(), target.float(), mode, beta), labels, ignore).sum(-1)
    if labels is None:
        count = constant(rows.numel(), torch.float64, x.device)
    else:
        count = (labels != ignore).sum().double()
    scale = torch.where(count == 0, 0.0, factor / (count if divide else torch.ones_like(count)))
    return torch.stack((torch.where(scale == 0, 0.0, rows.double().sum() * scale), scale)).float()


def reference_bwd(
    grad: Tensor, x: Tensor, target: Tensor, labels: Tensor | None, total: Tensor | None, ignore: int, mode: int,
    beta: float, in_target: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient in x, or in the target."""
    incoming = grad.float() if total is None else grad * total[1]
    a, b = x.float(), target.float()
    if mode == REVERSE:
        a, b, in_target = b, a, not in_target
    if mode == MIXED:
        out = _mixed(a, b, beta)[int(in_target)]
    elif mode == PROBABILITY:
        out = -b
    elif in_target:
        p = b.exp()
        out = p * (torch.where(p == 0, 0.0, b - a) + 1)
    else:
        out = -b.exp()
    return _without_ignored(out * incoming, labels, ignore).to(x.dtype).contiguous()
