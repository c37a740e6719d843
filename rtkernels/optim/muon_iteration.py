"""Orthogonalisation of batches of matrices: quintic Newton-Schulz, Polar Express, and the Gram form of either."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.ops.gemm.symmetric_mm import SYMMETRIC_MM

Coefficients = tuple[float, float, float]
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)  # as in torch.optim.Muon
_POLAR_EXPRESS = (
    (8.28721, -23.59589, 17.30039), (4.10706, -2.94785, 0.54484), (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005), (2.30065, -1.66890, 0.41881),
)  # fmt: skip
_SAFETY = 1.05  # singular values may exceed 1 by this factor, because of rounding
POLAR_EXPRESS = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS)
_RESTART = 2  # steps after which the Gram form starts from a new matrix: R loses small singular values
_GRAM_FROM = 1.5  # long side over short side from which the Gram form takes less time


def schedule(coefficients: Coefficients | Sequence[Coefficients] | str, steps: int) -> list[Coefficients]:
    """Return the coefficients of every step; the last ones are repeated."""
    if isinstance(coefficients, str):
        coefficients = POLAR_EXPRESS
    if isinstance(coefficients[0], (int, float)):
        return [tuple(coefficients)] * steps
    given = [tuple(one) for one in coefficients]
    return [given[min(i, len(given) - 1)] for i in range(steps)]


def uses_gram(rows: int, cols: int, gram: bool | None) -> bool:
    """Return whether matrices of a shape take the Gram form."""
    short, long = sorted((rows, cols))
    return short != long and (long >= _GRAM_FROM * short if gram is None else gram)


def orthogonalize_(x: Tensor, coefficients: Sequence[Coefficients], eps: float, gram: bool | None = None) -> Tensor:
    """Return the orthogonal factors of a batch of matrices, about.

    Args:
        x: bfloat16, contiguous ``[batch, rows, cols]``; overwritten.
        coefficients: ``(a, b, c)`` of every step ``x <- a x + b (x x^T) x + c (x x^T)^2 x``.
        eps: Least norm to divide by.
        gram: Iterate on ``x x^T`` instead of x, in float16. None: if that takes less time.

    Returns:
        A tensor like x; bfloat16, or float16 from the Gram form.
    """
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=eps)
    if not uses_gram(x.shape[1], x.shape[2], gram) or not coefficients:
        return _iterate(x.div_(norm), coefficients)
    # Powers of two keep elements of x and of x x^T, which are small where matrices are large, in the range of float16.
    size = 2.0 ** min(max(int(math.log2(x.shape[1] * x.shape[2])) // 2 - 3, 0), 12)
    short = 2.0 ** min(int(math.log2(min(x.shape[1:]))), 13)
    x = torch.mul(x, size / norm, out=torch.empty_like(x, dtype=torch.float16))
    for first in (0, _RESTART)[: 1 + (len(coefficients) > _RESTART)]:
        part = coefficients[first:_RESTART] if first == 0 else coefficients[first:]
        factor = _gram_factor(x, part, short if first == 0 else min(short, 64.0), size)
        left, right = (factor, x) if x.shape[1] <= x.shape[2] else (x, factor)
        is_last = first + len(part) == len(coefficients)
        x = torch.baddbmm(x, left, right, beta=0.0, alpha=1 / size if is_last else 1.0)
    return x


def _iterate(x: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    tall = x.shape[1] > x.shape[2]
    other = torch.empty_like(x)
    for a, b, c in coefficients:
        square = SYMMETRIC_MM(x.mT if tall else x, None, None, 1.0, 0.0, 0.0)
        factor = SYMMETRIC_MM(square, None, square, c, b, 0.0)
        left, right = (x, factor) if tall else (factor, x)
        torch.baddbmm(x, left, right, beta=a, out=other)
        x, other = other, x
    return x


def _gram_factor(x: Tensor, coefficients: Sequence[Coefficients], scale: float, size: float) -> Tensor:
    """Return the matrix that several steps multiply x by. All factors are polynomials of one matrix, so they commute.

    `x` is `size` times the matrix of which this is the factor; its square is computed `scale` times as large.
    """
    tall = x.shape[1] > x.shape[2]
    square = SYMMETRIC_MM(x.mT if tall else x, None, None, scale / size**2, 0.0, 0.0)
    product: Tensor | None = None
    for i, (a, b, c) in enumerate(coefficients):
        factor = SYMMETRIC_MM(square, None, square, c / scale**2, b / scale, a)
        product = factor if product is None else SYMMETRIC_MM(product, factor, None, 1.0, 0.0, 0.0)
        if i + 1 < len(coefficients):
            half = SYMMETRIC_MM(square, factor, None, 1.0, 0.0, 0.0)
            square = SYMMETRIC_MM(half, factor, None, 1.0, 0.0, 0.0)
    return product
