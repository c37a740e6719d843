"""Routed tokens, and how results are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.moe.moe_index_layout import MoeIndex, build, max_rows
from support.compare import ROUNDOFF, assert_close


def routed(tokens: int, experts: int, top_k: int, pad: int = 1, rows: int | None = None, seed: int = 0) -> MoeIndex:
    """An index of random choices, some of them absent or of experts that do not exist."""
    g = torch.Generator().manual_seed(seed)
    choices = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
    choices = torch.where(torch.rand(tokens, top_k, generator=g) < 0.1, -1, choices)
    if tokens > 3:
        choices[3] = -1
        choices[2, 0] = experts + 7
    return build(choices, experts, pad, max_rows(tokens, top_k, experts, pad) if rows is None else rows)


def on(device: str, index: MoeIndex) -> MoeIndex:
    return MoeIndex(*(t.to(device) for t in index))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, exact: Tensor, magnitude: Tensor, roundings: float, what: str) -> None:
    """One rounding of the result, and that many of fp32 relative to the sum of magnitudes."""
    share = roundings * 2.0**-24 / ROUNDOFF[got.dtype]
    assert_close(got, exact, c=1.001, scale=exact.abs() + share * magnitude, what=what)
