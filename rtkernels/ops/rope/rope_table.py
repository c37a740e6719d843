"""Tables of angles for rotary embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.arguments import a_number, an_integer


def rope_table(
    positions: int | Tensor, dim: int, *, base: float = 10000.0, scaling: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cos and sin of ``position * scaling * base ** (-2 i / dim)`` for the pairs of a head.

    For :func:`rope`, :func:`qkv_split` and :func:`append_kv_cache`, whichever elements make a pair. Worked out in
    float64 and rounded once, in plain torch: for tables that are made when a model is loaded.

    Args:
        positions: How many, from 0 on, or a tensor ``[...]`` of them.
        dim: Rotated elements of a head, a multiple of 2.
        base: As models call ``rope_theta``.
        scaling: Factor of positions: 1 / s for linear interpolation by s.
        dtype: Of the tables: bfloat16, float16 or float32.
        device: Where; that of `positions` if it is a tensor.

    Returns:
        ``(cos, sin)``, each ``[positions, dim / 2]``.
    """
    if an_integer("dim", dim) <= 0 or dim % 2:
        raise ArgumentError(f"dim is {dim}; expected a multiple of 2 above 0, the rotated elements of a head")
    if dtype not in FLOAT_DTYPES:
        raise ArgumentError(f"dtype is {dtype}; expected bfloat16, float16 or float32")
    if not a_number("base", base) > 0:
        raise ArgumentError(f"base is {base}; expected a number above 0")
    if not isinstance(positions, Tensor):
        if an_integer("positions", positions) < 0:
            raise ArgumentError(f"positions is {positions}; expected a number of positions, or a tensor of them")
        positions = torch.arange(positions, dtype=torch.float64, device=device)
    rates = float(base) ** (torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / -dim)
    if a_number("scaling", scaling) != 1:
        positions = positions.to(torch.float64) * float(scaling)
    angles = positions.to(torch.float64).unsqueeze(-1) * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)
