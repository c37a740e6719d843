"""The multi-tensor ops in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SQUARES, MAGNITUDES, LARGEST, ZEROS = range(4)  # cuda_src/multi/multi_reduce.cu


def out_dtype(kind: int, raw: bool) -> torch.dtype:
    """Return the dtype of a reduction: counts are integers, unfinished sums fp64, norms fp32."""
    return torch.int64 if kind == ZEROS else torch.float64 if raw else torch.float32


def reduce(tensors: Sequence[Tensor], kind: int, per_tensor: bool, raw: bool) -> Tensor:
    """Return the reduction of all tensors, then of each if requested."""
    place = tensors[0].device if len(tensors) else "cpu"
    each = [_reduce_one(t.detach(), kind) for t in tensors]
    zero = torch.zeros(1, dtype=torch.float64, device=place)
    parts = torch.stack([zero[0], *each])
    total = parts.amax() if kind == LARGEST else parts.sum()
    out = torch.stack([total, *each]) if per_tensor else total.reshape(1)
    if kind == SQUARES and not raw:
        out = out.sqrt()
    return out.to(out_dtype(kind, raw))


def _reduce_one(t: Tensor, kind: int) -> Tensor:
    if kind == ZEROS:
        return (t == 0).sum().double()
    exact = t.double()
    if kind == SQUARES:
        return exact.square().sum()
    if kind == MAGNITUDES:
        return exact.abs().sum()
    return exact.abs().amax() if t.numel() else exact.sum()


def _factor(by: Tensor | None, scale: float, max_norm: float) -> Any:
    if max_norm >= 0:
        return (max_norm / (by + 1e-6)).clamp(max=1.0).reshape(())
    factor = torch.tensor(scale, dtype=torch.float32, device="cpu")
    return factor if by is None else (factor.to(by.device) * by).reshape(())


def scale_(tensors: Sequence[Tensor], by: Tensor | None, scale: float, max_norm: float) -> None:
    """Multiply by ``scale * by``, or with `max_norm` of at least 0 clip to it, `by` being the norm."""
    factor = _factor(by, scale, max_norm)
    for t in tensors:
        t.detach().copy_(t.detach().float() * factor.to(t.device))


def clip_(tensors: Sequence[Tensor], kind: int, max_norm: float) -> Tensor:
    """Clip to a norm of at most `max_norm` and return the norm before."""
    norm = reduce(tensors, kind, False, False)
    scale_(tensors, norm, 1.0, max_norm)
    return norm.reshape(())


def copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], by: Tensor | None, scale: float) -> None:
    """Write ``inputs * scale * by`` into outputs."""
    factor = _factor(by, scale, -1.0)
    for to, t in zip(outputs, inputs, strict=True):
        to.detach().copy_(t.detach().float() * factor.to(t.device))
