"""Cross entropy in plain torch: what CPU tensors get, with the rounding and the rules of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE
from rtkernels.runtime.layout import nothing


def check_range(labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raise an ArgumentError for a label outside the vocabulary."""
    bad = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if bad.any():
        row = int(bad.flatten().to(torch.uint8).argmax())
        raise ArgumentError(
            f"labels has {int(labels.flatten()[row])} in row {row} of the flattened labels, which is neither a column "
            f"of the vocabulary nor ignore_index (on a GPU this is about an earlier call)"
        )


def capped(logits: Tensor, softcap: float) -> Tensor:
    z = logits.float()
    return softcap * torch.tanh(z / softcap) if softcap else z


def parts(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, softcap: float, first: int,
    vocabulary: int,
) -> Tensor:  # fmt: skip
    """Return ``[5, rows]``: top, level, score of the label, sum of scores, whether the label is the first largest."""
    check_range(labels, ignore_index, vocabulary)
    z, labels = capped(logits, softcap).reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    ignored, column = labels == ignore_index, labels - first
    here = (column >= 0) & (column < z.shape[-1]) & ~ignored
    if z.shape[0] == 0:
        return z.new_empty(5, 0)
    top = torch.where(z.isnan(), -torch.inf, z).amax(-1)
    level = (z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1)).exp().sum(-1).log()
    target = z.gather(-1, torch.where(here, column, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~here, -torch.inf)
    total = z.sum(-1) if label_smoothing else torch.zeros_like(top)
    correct = here & (target == top) & ((z == top.unsqueeze(-1)).to(torch.uint8).argmax(-1) == column)
    return torch.stack((top, level, target, total, correct.float())).masked_fill(ignored, 0.0)


def row_losses(
    top: Tensor, level: Tensor, target: Tensor, total: Tensor, smoothing: float, z_loss: float, vocabulary: int
) -> Tensor:
    """Return the loss of each row from the numbers of the whole vocabulary."""
    loss = level + (top - target)
    if smoothing:
        loss = (1 - smoothing) * loss + (smoothing * (level + top) - smoothing / vocabulary * total)
    return loss + z_loss * (top + level).square() if z_loss else loss


def reduced(losses: Tensor, labels: Tensor, ignore_index: int, reduction: int) -> tuple[Tensor, Tensor]:
    """Return the loss in the shape the reduction gives, and ``[1]``: 1 / rows that count (empty for none)."""
    if reduction == NONE:
        return losses.reshape(labels.shape), nothing(losses)
    count = (labels != ignore_index).sum()
    total = losses.double().sum().float()
    factor = torch.where(count == 0, 0.0, 1.0 / count.float()).reshape(1)
    return torch.where(count == 0, 0.0, total / count) if reduction == MEAN else total, factor


def forward(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    """The operator ``cross_entropy_fwd``."""
    vocabulary = logits.shape[-1] if logits.dim() else 0
    top, level, target, total, correct = parts(
        logits, labels, ignore_index, label_smoothing, softcap, 0, vocabulary
    ).unbind()
    losses = row_losses(top, level, target, total, label_smoothing, z_loss, vocabulary)
    losses = losses.masked_fill(labels.reshape(-1) == ignore_index, 0.0)
    loss, factor = reduced(losses, labels, ignore_index, reduction)
    hits = reduced(correct, labels, ignore_index, reduction)[0].contiguous() if accuracy else nothing(losses)
    return loss.contiguous(), hits.clone(), torch.stack((top, level)), factor


def backward(
    dloss, logits, labels, stats, factor, ignore_index, label_smoothing, z_loss, softcap, first, vocabulary
) -> Tensor:
    """The operator ``cross_entropy_bwd``."""
    z = capped(logits, softcap).reshape(-1, logits.shape[-1])
    labels = labels.reshape(-1).long()
    g = dloss.float().reshape(-1).expand(labels.shape) * (1.0 if factor is None or not factor.numel() else factor)
    top, level = stats
    p = (z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1)).exp()
    scale = g * (-level).exp() * (1 + 2 * z_loss * (top + level))
    d = p * scale.unsqueeze(-1) - (g * (label_smoothing / vocabulary)).unsqueeze(-1)
    column = labels - first
    here = (column >= 0) & (column < z.shape[-1]) & (labels != ignore_index)
    d.scatter_add_(
        -1, torch.where(here, column, 0).unsqueeze(-1), torch.where(here, (label_smoothing - 1) * g, 0.0).unsqueeze(-1)
    )
    if softcap:
        d = d * (1 - (z / softcap).square())
    d = d.masked_fill((labels == ignore_index).unsqueeze(-1), 0.0)
    return d.to(logits.dtype).reshape(logits.shape).contiguous()
