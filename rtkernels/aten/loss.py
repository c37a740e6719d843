"""Losses of aten over classes: nll_loss and nll_loss2d with their gradients (family ``row``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.table import DTYPE, EMPTY, OPTION, NotHandled, Overload
from rtkernels.aten.values import any_outside
from rtkernels.ops.reduce.nll_loss import nll_loss, nll_loss_grad
from rtkernels.ops.shared.strided import FLOATS


def _rows(x: Tensor) -> Tensor | None:
    """Return x as (batch, classes, spatial), a view; None if there is none."""
    if x.dim() == 1:
        return x[None, :, None]
    if x.dim() == 2:
        return x[:, :, None]
    if x.dim() == 4 and (x.shape[3] == 1 or x.shape[2] == 1 or x.stride(2) == x.shape[3] * x.stride(3)):
        return x.flatten(2)
    return None


def _refused(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> NotHandled | None:
    if x.dtype not in FLOATS or target.dtype != torch.int64 or (weight is not None and weight.dtype != x.dtype):
        return DTYPE
    if x.numel() == 0 or target.numel() == 0:
        return EMPTY
    classes = x.shape[0] if x.dim() == 1 else x.shape[1]
    places = () if x.dim() == 1 else (x.shape[0], *x.shape[2:])
    if reduction not in (0, 1, 2) or tuple(target.shape) != places or x.device != target.device:
        return OPTION
    if weight is not None and tuple(weight.shape) != (classes,):
        return OPTION
    return None


def _forward(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    if (refused := _refused(x, target, weight, reduction)) is not None:
        return refused
    rows_ = _rows(x)
    if rows_ is None or any_outside(target, 0, rows_.shape[1], ignore_index):
        return OPTION
    return nll_loss(rows_, target, weight, ignore_index, reduction)


def _backward(
    grad_output: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    total_weight: Tensor,
) -> Any:  # fmt: skip
    if (refused := _refused(x, target, weight, reduction)) is not None:
        return refused
    if grad_output.dtype != x.dtype or total_weight.dtype != x.dtype:
        return DTYPE
    if tuple(grad_output.shape) != (tuple(target.shape) if reduction == 0 else ()):
        return OPTION
    classes, spatial = (x.shape[0], 1) if x.dim() == 1 else (x.shape[1], x.shape[2:].numel())
    if any_outside(target, 0, classes, ignore_index):
        return OPTION
    return nll_loss_grad(
        grad_output, target, weight, total_weight, classes, spatial, ignore_index, reduction
    ).view(x.shape)  # fmt: skip


def rows() -> Iterator[Overload]:
    """Yield the overloads of this module."""
    opinfo = ("nn.functional.nll_loss", "nn.functional.cross_entropy")
    for name in ("nll_loss", "nll_loss2d"):
        yield Overload(f"{name}_forward", "row", _forward, opinfo=opinfo, replays="cuda")
        yield Overload(f"{name}_backward", "row", _backward, opinfo=opinfo, replays="cuda")
