"""The identity with a gradient that is smaller for early positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.runtime.operator.autograd import differentiable


class _GradScaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficient: float, dim: int) -> Tensor:
        ctx.coefficient, ctx.dim = coefficient, dim
        return x.view_as(x)

    @staticmethod
    @differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        length = dy.shape[ctx.dim]
        remaining = torch.arange(length, 0, -1, dtype=torch.float32, device=dy.device)
        shape = [1] * dy.dim()
        shape[ctx.dim] = length
        return (dy * remaining.pow(-ctx.coefficient).view(shape)).to(dy.dtype), None, None


class GradScaling(torch.nn.Module):
    """The identity, with the gradient at position t multiplied by ``(length - t) ** -coefficient``.

    Args:
        coefficient: The exponent; 0 changes nothing.
        dim: The dimension of positions.
    """

    def __init__(self, coefficient: float = 0.2, dim: int = 1) -> None:
        super().__init__()
        self.coefficient, self.dim = coefficient, dim

    def forward(self, x: Tensor) -> Tensor:
        return _GradScaling.apply(x, self.coefficient, self.dim)

    def extra_repr(self) -> str:
        return f"coefficient={self.coefficient}, dim={self.dim}"
