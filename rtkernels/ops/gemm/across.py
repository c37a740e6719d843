"""Codes whose unit stride is not along k: products read them along k, so they are transposed or copied first."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.layout.transpose import transpose

_CODES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.int8})  # bytes of uint8 may hold two codes


def _along_k(t: Tensor, flipped: bool, packed: bool) -> Tensor:
    if not isinstance(t, Tensor) or t.dtype.itemsize != 1 or not 2 <= t.dim() <= 3 or 0 in t.shape:
        return t
    other, k = (-1, -2) if flipped else (-2, -1)
    if t.stride(k) == 1 or t.shape[k] == 1:
        return t
    if t.shape[other] == 1 or t.stride(other) != 1:
        return t.transpose(-2, -1).contiguous().transpose(-2, -1) if flipped else t.contiguous()
    if packed or t.dtype not in _CODES:
        return t
    return transpose(t).transpose(-2, -1) if flipped else transpose(t.transpose(-2, -1))


def along_k(a: Tensor, b: Tensor, b_layout: str, packed: str | None) -> tuple[Tensor, Tensor]:
    """Return both operands with unit stride along k and the same shapes: themselves, or copies by a transposing launch.

    Args:
        a: ``[..., m, k]``.
        b: As `b_layout` says; with "auto", k is what has the unit stride.
        b_layout: "auto", "nk" or "kn".
        packed: As the products take it. Operands with two codes in a byte are not transposed.
    """
    codes = packed is not None
    if b_layout != "auto":
        b = _along_k(b, b_layout == "kn", codes)
    elif isinstance(b, Tensor) and b.dtype.itemsize == 1 and 2 <= b.dim() <= 3 and 1 in b.shape[-2:]:
        b = b.contiguous()  # a row, or a column: its elements are along k
    return _along_k(a, False, codes), b
