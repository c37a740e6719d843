"""What the fp8 tests quantise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DEVICE_CODE = ("sm_80", "sm_90", "cuda")


def wild(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers of row-wise magnitude; NaN, infinities, zeros, tiny and huge ones among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * 2.0 ** torch.randint(-12, 12, (rows, 1), generator=g)
    most = torch.finfo(dtype).max
    for value in (math.nan, -math.nan, math.inf, -math.inf, -0.0, torch.finfo(dtype).tiny / 4, most, -most):
        mask = torch.rand(rows, cols, generator=g) < 0.003
        x = torch.where(mask, value, x)
    x[: rows // 3, : cols // 2] = 0.0
    return x.to(dtype)


SHAPES = [(1, 1), (3, 128), (16, 264), (130, 136), (33, 257), (144, 40), (5, 1029)]


def views() -> Iterator[tuple[str, Callable[[torch.dtype], Tensor]]]:
    for rows, cols in SHAPES:
        yield f"{rows}x{cols}", lambda t, r=rows, c=cols: wild(r, c, t, seed=c)
    yield "padded rows", lambda t: wild(20, 320, t)[:, :136]
    yield "misaligned", lambda t: wild(20, 321, t)[:, 1:137]
    yield "every second row", lambda t: wild(40, 136, t)[::2]
    yield "expanded", lambda t: wild(1, 136, t).expand(5, 136)
    yield "transposed", lambda t: wild(136, 24, t).t()
    yield "one long row", lambda t: wild(1, 17000, t)
    yield "no rows", lambda t: wild(0, 8, t)
    yield "no columns", lambda t: wild(3, 0, t)


VIEWS = dict(views())


def same_strides(x: Tensor, device: str) -> Tensor:
    """Copy to a device together with what lies around it, so that strides and offset stay."""
    if device == "cpu":
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())
