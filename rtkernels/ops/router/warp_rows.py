"""What top-k, the router and its losses share on the host: rows in registers of a warp."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_dimensions, token
from rtkernels.runtime.layout import vector_bytes
from rtkernels.runtime.operator.declared import Meta

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COLUMNS = (2, 8)  # of a lane
WARP_COLUMNS = 256  # at most
OCTET = 8  # lanes of a row in cuda_src/router/top8.cuh, which find as many numbers
_GROUP = 4  # columns that are sorted together there
MAX_K = 64


def check_rows(name: str, meta: Meta, limit: int, what: str = "columns") -> None:
    """Raise an ArgumentError unless a tensor is of a float type, with 1 to `limit` numbers in its last dimension."""
    token(name, meta.dtype)
    check_dimensions(name, meta.shape)
    if not 1 <= meta.shape[-1] <= limit:
        raise ArgumentError(f"{name} has {meta.shape[-1]} {what}; expected 1 to {limit}")


def check_k(k: int, cols: int) -> None:
    """Raise an ArgumentError unless `k` numbers of a row can be chosen."""
    if not 1 <= k <= min(MAX_K, cols):
        raise ArgumentError(f"k is {k}; expected 1 to {min(MAX_K, cols)} for rows of {cols}")


def lane_columns(cols: int) -> int:
    """Return how many columns of such a row a lane holds."""
    return 2 if cols <= 64 else 8


def whole_vectors(meta: Meta, v: int) -> bool:
    """Return True if a lane can read its columns in whole vectors."""
    size = meta.dtype.itemsize
    wanted = min(16, v * size)
    steps = 0 if meta.rows <= 1 else meta.row_stride * size
    return meta.shape[-1] % v == 0 and vector_bytes(meta.misaligned, steps, limit=wanted) == wanted


def takes_octets(meta: Meta, k: int) -> bool:
    """Return True if eight lanes can find the k largest numbers of a row (cuda_src/router/top8.cuh)."""
    return k <= OCTET and meta.shape[-1] <= WARP_COLUMNS and whole_vectors(meta, _GROUP)
